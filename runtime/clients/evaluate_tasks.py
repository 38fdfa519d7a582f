"""Runs lm-evaluation-harness tasks against a server, one process per task, and reads the results.

lm-eval has its own environment (requirements-eval.txt), because it needs transformers and many other
packages. It reads the server's key from the environment variable OPENAI_API_KEY.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..errors import UserError
from .client import KEY_VARIABLE
from .output_files import write_whole

MODELS = {"chat": "local-chat-completions", "completions": "local-completions"}
"""lm-eval's names of its clients. The chat client lets the server apply the chat template, and cannot request
log probabilities of prompts. The completions client tokenizes by itself."""

LOG, SETTINGS = "lm-eval.log", "settings.json"
"""Files next to lm-eval's results of a task: its output, and the settings, written when lm-eval has ended."""

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True)
class TaskSettings:
    """How a task is run; results under different settings are not compared.

    Attributes:
        api: "chat" or "completions".
        limit: number of questions; None for all.
        max_tokens: largest length of an answer, if the task does not set it.
        max_length: largest sum of question and answer, in tokens; longer questions lose their start.
        tokenizer: for "completions" only: a folder or a Hugging Face id.
    """

    api: str = "chat"
    limit: int | None = None
    max_tokens: int = 512
    max_length: int | None = None
    tokenizer: str | None = None


@dataclass(frozen=True)
class Score:
    """One metric of a task.

    Attributes:
        task: name of the task or of a subtask.
        metric, filter: as lm-eval names them.
        error: the standard error; None if lm-eval gives none.
        questions: number of questions.
        better: which values are better, "higher" or "lower".
        by_question: the metric, if lm-eval logs it; only for the requested task, not for its subtasks.
    """

    task: str
    metric: str
    filter: str
    value: float
    error: float | None
    questions: int | None
    better: str
    by_question: Mapping[str, float]


@dataclass(frozen=True)
class TaskOutcome:
    """A task's scores, or a sentence that says why there are none.

    Attributes:
        version: of lm-eval.
        empty: number of answers without content, which lm-eval counts as wrong.
    """

    task: str
    settings: TaskSettings
    version: str = ""
    scores: tuple[Score, ...] = ()
    failure: str | None = None
    empty: int = 0


def find_program(path: str | None, requirements: str | None) -> str:
    """Find lm_eval's program.

    Args:
        given: its path; None searches for it by name.
        requirements: the requirements file that pins it.
    """
    program = shutil.which(path or "lm_eval")
    if program is None:
        what = f"there is no program {path}" if path else "lm_eval is not installed"
        file = requirements or "requirements-eval.txt"
        raise UserError(
            f"{what}: the recipe's tasks cannot be run",
            f"python3 -m venv .eval && .eval/bin/pip install -r {file}; then --lm-eval .eval/bin/lm_eval",
        )
    return program


@dataclass(frozen=True)
class LmEval:
    """lm-eval's program, and the server that it evaluates.

    Attributes:
        program: its path.
        url: the server's address, without /v1.
        model: the served name.
        at_once: number of concurrent requests.
        include: folder of additional tasks' YAML files.
    """

    program: str
    url: str
    model: str
    at_once: int = 16
    include: Path | None = None


def run_task(lm_eval: LmEval, task: str, settings: TaskSettings, folder: Path) -> TaskOutcome:
    """Return a task's outcome: the recorded one if its settings are the same, else that of a new run.

    Args:
        folder: the side's folder; each task gets a folder in it.
    """
    place = _place(folder, task)
    before = recorded(folder, task)
    if before is not None and before.failure is None and before.settings == settings:
        return before
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    log = place / LOG
    with log.open("wb") as output:
        done = subprocess.run(
            command(lm_eval, task, settings, place),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(os.environ),
        )
    log_text = _without_key(log)
    if done.returncode:
        return TaskOutcome(task, settings, failure=f"{task}: {explained(log_text, done.returncode)} ({log})")
    write_whole(place / SETTINGS, json.dumps(asdict(settings)))
    return read_results(place, task, settings)


def command(lm_eval: LmEval, task: str, settings: TaskSettings, folder: Path) -> list[str]:
    """Return the command line that starts lm-eval."""
    arguments: dict[str, Any] = {
        "model": lm_eval.model,
        "base_url": lm_eval.url + PATHS[settings.api],
        "num_concurrent": lm_eval.at_once,
        "max_gen_toks": settings.max_tokens,
        "timeout": 3600,
    }
    if settings.max_length is not None:
        arguments["max_length"] = settings.max_length
    if settings.api == "completions":
        arguments |= {"tokenizer": settings.tokenizer or lm_eval.model, "tokenizer_backend": "huggingface"}
    words = [lm_eval.program, "run", "--model", MODELS[settings.api]]
    # JSON, because lm-eval would turn a name that looks like a number into one if it were given as key=value.
    words += ["--model_args", json.dumps(arguments), "--tasks", task]
    words += ["--output_path", str(folder / "lm-eval"), "--log_samples"]
    if settings.api == "chat":
        words.append("--apply_chat_template")
    if settings.limit is not None:
        words += ["--limit", str(settings.limit)]
    if lm_eval.include is not None:
        words += ["--include_path", str(lm_eval.include)]
    return words


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return lm-eval's environment: the server's key under the name that lm-eval reads, and no PYTHONPATH."""
    passed = {
        name: value for name, value in inherited.items() if name not in ("PYTHONPATH", "OPENAI_API_KEY")
    }
    return passed | {"OPENAI_API_KEY": inherited.get(KEY_VARIABLE, "")}


REASONS = (
    (
        "Tasks? not found: ",
        "lm-eval knows no such task; `lm_eval ls tasks` lists them, --include-path DIR adds more",
    ),
    (
        "Loglikelihood is not supported for chat completions",
        "it scores given answers by their log probabilities, which the chat interface does not return; "
        "--task-api completions asks for them, which vllm-tpu has for models of text alone",
    ),
    ("confirm_run_unsafe_code", "it runs code that the model writes, which eval.sh does not allow"),
    ("ClientConnectorError|ServerDisconnectedError|ClientOSError", "the server no longer answers"),
    (
        "OfflineModeIsEnabled|LocalEntryNotFoundError|DatasetNotFoundError|MaxRetryError|GatedRepoError",
        "its data could not be fetched from the Hugging Face hub",
    ),
)
"""What lm-eval's output says, and the reason in one sentence; the first that is found counts."""


def explained(log: str, status: int) -> str:
    """Explain in one sentence why lm-eval ended, from its output."""
    known = next((reason for words, reason in REASONS if re.search(words, log)), None)
    if known is not None:
        return known
    refused = re.findall(r"API request failed! Status code: (\d+), Response text: (.{0,200})", log)
    if refused:
        return f"the server answered {refused[-1][0]}: {refused[-1][1]}"
    errors = re.findall(
        r"^(?:[A-Za-z_.]*(?:Error|Exception)|lm[-_]eval[^:\n]*: error): .+", log, re.MULTILINE
    )
    return f"lm-eval ended with {status}{f': {errors[-1][:200]}' if errors else ''}"


def read_results(folder: Path, task: str, settings: TaskSettings) -> TaskOutcome:
    """Read the results that a run of lm-eval wrote to `folder`."""
    files = sorted((folder / "lm-eval").glob("*/results_*.json"))
    try:
        results = json.loads(files[-1].read_text("utf-8"))
        scores = tuple(_scores(results, task, files[-1].parent))
        empty = (folder / LOG).read_text("utf-8", "replace").count("API returned null content")
    except (LookupError, OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        return TaskOutcome(
            task, settings, failure=f"{task}: lm-eval left no results in {folder} ({type(error).__name__})"
        )
    if not scores:
        return TaskOutcome(task, settings, failure=f"{task}: lm-eval's results have no metric ({files[-1]})")
    return TaskOutcome(task, settings, str(results.get("lm_eval_version", "")), scores, empty=empty)


def recorded(folder: Path, task: str) -> TaskOutcome | None:
    """Read the outcome of an earlier run that ended, from a side's folder of tasks; None if there is none."""
    place = _place(folder, task)
    try:
        settings = TaskSettings(**json.loads((place / SETTINGS).read_text("utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return read_results(place, task, settings)


def _without_key(log: Path) -> str:
    """Remove the server's key from a log, and return the log's text."""
    text, key = log.read_text("utf-8", "replace"), os.environ.get(KEY_VARIABLE)
    if key and key in text:
        text = text.replace(key, "***")
        log.write_text(text, encoding="utf-8")
    return text


def _place(folder: Path, task: str) -> Path:
    return folder / quote(task, safe="")


def _scores(results: Mapping[str, Any], task: str, folder: Path) -> Sequence[Score]:
    """Return the task's own metrics, followed by those of its subtasks if it is a group."""
    table = {**results["results"], **results.get("groups", {})}
    names = sorted(table, key=lambda name: (name != task, name))
    scores = []
    for name in names:
        directions = results.get("higher_is_better", {}).get(name, {})
        for key, value in table[name].items():
            metric, _, filter = key.partition(",")
            if not filter or metric.endswith("_stderr") or isinstance(value, bool):
                continue
            if not isinstance(value, int | float):
                continue
            error = table[name].get(f"{metric}_stderr,{filter}")
            count = results.get("n-samples", {}).get(name, {}).get("effective")
            by_question = _each(folder, name, metric, filter) if name == task else {}
            better = "lower" if directions.get(metric) is False else "higher"
            known = error if isinstance(error, int | float) else None
            scores.append(Score(name, metric, filter, float(value), known, count, better, by_question))
    return scores


def _each(folder: Path, task: str, metric: str, filter: str) -> dict[str, float]:
    """Return a metric by question; {} if it is not one number per question."""
    values: dict[str, float] = {}
    for file in folder.glob(f"samples_{task}_*.jsonl"):
        for line in file.read_text("utf-8").split("\n"):
            if not line.strip():
                continue
            row = json.loads(line)
            if row.get("filter", filter) != filter:
                continue
            value = row.get(metric)
            if not isinstance(value, int | float):
                return {}
            values[f"{row['doc_id']} {row.get('doc_hash', '')}"] = float(value)
    return values
