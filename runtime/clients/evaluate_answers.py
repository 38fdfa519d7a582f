"""A side of an evaluation, the base or the fine-tuned model: its server, and its answers on disk.

answers.jsonl has a line for each answer with the settings of its request. A restart asks only for missing
answers, and ignores answers under other settings. Failed requests are not recorded, so they are asked
again. side.json records which model gave the answers, so that a change of the model is noticed.
"""

from __future__ import annotations

import fcntl
import json
import os
import queue
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..progress import Progress
from .client import NO_HOST, REFUSED, STATUS, Client, ServerError, pick
from .evaluate_prompts import Prompt
from .output_files import write_whole

BASE, TUNED = "base", "tuned"
TITLES = {BASE: "base", TUNED: "fine-tuned"}

SAME_MODEL = 0.2
"""The largest difference of a log probability between two answers of one model. bfloat16 and a different
batch change it by a few hundredths."""

SAME_WEIGHTS = 1e-5
"""The same limit for telling the base from the fine-tuned model."""

PROBE = "The capital of France is"


@dataclass(frozen=True)
class Side:
    """A model under evaluation, by its served name.

    Attributes:
        name: "base" or "tuned".
        url: address of its server, now or in the recorded run.
        version: of vLLM.
        probe: log probabilities of the likeliest first tokens of an answer, by token; {} if the server
            does not report them.
        probed: digest of the prompt that `probe` answers.
    """

    name: str
    model: str
    url: str
    version: str | None
    probe: Mapping[str, float]
    probed: str


def open_side(
    client: Client, name: str, model: str, first: Prompt | None, folder: Path, fresh: bool = False
) -> Side:
    """Describe the side as it is served now, and record it in `folder`/side.json.

    Args:
        first: prompt whose first answer token distinguishes models; None takes a built-in prompt.
        folder: of the side's answers and results.
        fresh: delete the recorded answers and results.

    Raises:
        UserError: the recorded results belong to another model.
    """
    prompt = first or Prompt(0, None, PROBE, "", "probe")
    side = Side(name, model, client.url, client.version(), probe(client, model, prompt), prompt.digest)
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    before = recorded_side(folder)
    if before is not None:
        again = "--fresh discards them and asks again; --results DIR keeps both"
        if before.model != model:
            raise UserError(f"{folder} holds the answers of {before.model}, not of {model}", again)
        if differ(before, side, SAME_MODEL):
            raise UserError(
                f"{folder} holds the answers of another model of the name {model}: its log probabilities "
                "were different",
                again,
            )
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "side.json", json.dumps(asdict(side), indent=2) + "\n")
    return side


def recorded_side(folder: Path) -> Side | None:
    """Read the side as it was last recorded; None if it never was."""
    try:
        return Side(**json.loads((folder / "side.json").read_text("utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def probe(client: Client, model: str, prompt: Prompt) -> dict[str, float]:
    """Return log probabilities of the likeliest first tokens; {} if the server does not report them."""
    path, body = request(model, prompt, SamplingSettings(max_tokens=1))
    body |= {"logprobs": 5} if prompt.messages is None else {"logprobs": True, "top_logprobs": 5}
    try:
        choice: Any = pick(client.post(path, body), path, "choices", 0, kind=dict)
        if prompt.messages is None:
            return dict(choice["logprobs"]["top_logprobs"][0])
        return {
            token["token"]: token["logprob"] for token in choice["logprobs"]["content"][0]["top_logprobs"]
        }
    except ServerError as error:
        # The requests for the prompts will report the error.
        if error.kind == STATUS and error.status not in (401, 403, 404):
            return {}
        raise
    except (LookupError, TypeError, ValueError):
        return {}


def differ(left: Side, other: Side, tolerance: float) -> bool:
    """Return whether two probes are from different models; False if that cannot be decided."""
    if not left.probe or not other.probe or left.probed != other.probed:
        return False
    shared = left.probe.keys() & other.probe.keys()
    # The last of five may swap places with a sixth.
    if len(shared) < min(len(left.probe), len(other.probe)) - 2:
        return True
    return any(abs(left.probe[token] - other.probe[token]) > tolerance for token in shared)


def same_weights(left: Side, other: Side) -> bool:
    """Return whether two probes agree as two probes of one model do."""
    comparable = bool(left.probe) and left.probed == other.probed
    return comparable and left.probe.keys() == other.probe.keys() and not differ(left, other, SAME_WEIGHTS)


ATTEMPTS = 3
"""Number of attempts for a request whose failure may be temporary: a busy server, a broken connection."""

PAUSE = 1.0
"""Seconds before the second attempt; the wait before the third is twice as long."""

HOPELESS = (401, 403, 404)
"""Statuses that every further request would also get."""


@dataclass(frozen=True)
class SamplingSettings:
    """How answers are sampled.

    Attributes:
        samples: number of answers to each prompt.
        max_tokens: largest length of an answer.
    """

    samples: int = 1
    temperature: float = 0.0
    max_tokens: int = 512

    def drawn(self) -> dict[str, Any]:
        """Return what an answer depends on: every setting except the number of samples."""
        values = asdict(self)
        del values["samples"]
        return values


@dataclass(frozen=True)
class Answer:
    """A model's answer to a prompt.

    Attributes:
        prompt: the prompt's digest.
        sample: the sample's number, counted from 0.
        cut: whether `max_tokens` ended it.
        tokens: number of tokens, if the server reports it.
    """

    prompt: str
    sample: int
    text: str
    cut: bool = False
    tokens: int | None = None


@dataclass
class SideAnswers:
    """The answers of a side.

    Attributes:
        kept: answers by prompt and sample, under the current settings.
        others: number of recorded answers under other settings.
        failures: the error message of each failed request, by prompt and sample.
        before: how many of `kept` an earlier run recorded.
    """

    kept: dict[tuple[str, int], Answer] = field(default_factory=dict)
    others: int = 0
    failures: dict[tuple[str, int], str] = field(default_factory=dict)
    before: int = 0

    def of(self, prompt: Prompt, settings: SamplingSettings) -> list[Answer]:
        """Return a prompt's answers, in the order of its samples."""
        keys = ((prompt.digest, sample) for sample in range(settings.samples))
        return [self.kept[key] for key in keys if key in self.kept]


def recorded(path: Path, settings: SamplingSettings) -> SideAnswers:
    """Read the answers of a file; none if there is no file. An incomplete line is ignored."""
    answers = SideAnswers()
    if not path.is_file():
        return answers
    for line in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
            drawn = {name: row[name] for name in settings.drawn()}
            answer = Answer(row["prompt"], row["sample"], row["text"], row["cut"], row["tokens"])
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if drawn != settings.drawn():
            answers.others += 1
        elif answer.sample < settings.samples:
            answers.kept[answer.prompt, answer.sample] = answer
    answers.before = len(answers.kept)
    return answers


def ask(
    client: Client,
    model: str,
    prompts: Sequence[Prompt],
    settings: SamplingSettings,
    path: Path,
    at_once: int = 16,
    label: str = "asking",
) -> SideAnswers:
    """Return all answers to the prompts. The answers that `path` lacks are requested and added to it.

    Args:
        model: its served name.
        path: answers.jsonl.
        at_once: number of concurrent requests.

    Raises:
        UserError: another run writes to `path`.
        ServerError: the server is gone, or would refuse every request; answers so far are recorded.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _journal(path) as write:
        answers = recorded(path, settings)
        wanted = [
            (prompt, sample)
            for sample in range(settings.samples)
            for prompt in prompts
            if (prompt.digest, sample) not in answers.kept
        ]
        with Progress(label, len(wanted)) as progress:
            for prompt, sample, outcome in _all(client, model, wanted, settings, at_once):
                if isinstance(outcome, Answer):
                    write({**asdict(outcome), "line": prompt.line, **settings.drawn()})
                    answers.kept[prompt.digest, sample] = outcome
                elif _is_final(outcome):
                    count = len(answers.kept)
                    kept = f"{count} of {len(prompts) * settings.samples} answers are in {path}"
                    help = f"{outcome.help}; {kept}" if outcome.help else kept
                    raise ServerError(
                        outcome.message,
                        f"{help}: run again to continue",
                        kind=outcome.kind,
                        status=outcome.status,
                    )
                else:
                    answers.failures[prompt.digest, sample] = outcome.message
                progress.advance(1)
    return answers


def request(model: str, prompt: Prompt, settings: SamplingSettings) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of the request for one answer; vLLM refuses a seed on TPUs."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
    }
    if prompt.messages is None:
        return "/v1/completions", {**body, "prompt": prompt.text}
    return "/v1/chat/completions", {**body, "messages": prompt.messages}


def _all(
    client: Client, model: str, wanted: Sequence[tuple[Prompt, int]], settings: SamplingSettings, at_once: int
) -> Iterator[tuple[Prompt, int, Answer | ServerError]]:
    """Send all requests from daemon threads, which end with the main one; yield outcomes as they arrive."""
    waiting: queue.SimpleQueue[tuple[Prompt, int]] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[Prompt, int, Answer | ServerError | BaseException]] = queue.SimpleQueue()
    for item in wanted:
        waiting.put(item)
    stopped = threading.Event()

    def work() -> None:
        while not stopped.is_set():
            try:
                prompt, sample = waiting.get_nowait()
            except queue.Empty:
                return
            outcome: Answer | ServerError | BaseException
            try:
                outcome = _one(client, model, prompt, sample, settings, stopped)
            except ServerError as error:
                outcome = error
            except BaseException as error:
                outcome = error
            done.put((prompt, sample, outcome))

    for _ in range(min(at_once, len(wanted))):
        threading.Thread(target=work, daemon=True).start()
    try:
        for _ in wanted:
            prompt, sample, outcome = done.get()
            if not isinstance(outcome, Answer | ServerError):
                raise outcome
            yield prompt, sample, outcome
    finally:
        stopped.set()


def _one(
    client: Client,
    model: str,
    prompt: Prompt,
    sample: int,
    settings: SamplingSettings,
    stopped: threading.Event,
) -> Answer:
    path, body = request(model, prompt, settings)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return _answer(prompt, sample, client.post(path, body), path)
        except ServerError as error:
            passing = error.kind != STATUS or error.status == 429 or (error.status or 0) >= 500
            if attempt == ATTEMPTS or not passing or stopped.is_set():
                raise
        time.sleep(PAUSE * attempt)
    raise AssertionError("not reached")


def _answer(prompt: Prompt, sample: int, body: Any, path: str) -> Answer:
    choice = pick(body, path, "choices", 0, kind=dict)
    if prompt.messages is None:
        text = pick(choice, path, "text", kind=str)
    else:
        # The content is None if the model called a tool instead of answering.
        text = pick(choice, path, "message", "content", kind=(str, type(None))) or ""
    usage = body.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return Answer(prompt.digest, sample, text, choice.get("finish_reason") == "length", tokens)


def _is_final(error: ServerError) -> bool:
    return error.kind in (REFUSED, NO_HOST) or error.status in HOPELESS


@contextmanager
def _journal(path: Path) -> Iterator[Any]:
    """Yield a function that appends a whole line to the file; only one run at a time may hold it."""
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"another run writes to {path}", "wait for it, or give this one another --results"
            ) from None
        end = os.lseek(handle, 0, os.SEEK_END)
        if end and os.pread(handle, 1, end - 1) != b"\n":
            os.write(handle, b"\n")  # ends an incomplete last line

        def write(row: Mapping[str, Any]) -> None:
            # ASCII, because an answer may hold half of a surrogate pair, which UTF-8 cannot encode.
            os.write(handle, json.dumps(row).encode() + b"\n")

        yield write
    finally:
        os.close(handle)
