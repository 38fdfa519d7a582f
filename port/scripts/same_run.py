"""Compare a tool's own run with its port, step by step on one tiny model.

    python -m recipec.port.scripts.same_run run FOLDER [--tool NAME] [--feature NAME] [--keep FOLDER]
    python -m recipec.port.scripts.same_run write       the table of port/same-run.md, from same_run.json

FOLDER holds a virtual environment for each tool, by its name in TOOLS. The script skips a tool without one,
and prints its name. Each run has ten steps in float32 on a CPU. Both runs start from the tool's initial
adapter, and use the rows in the tool's order. The record gets the results. The exit status is 1 if two runs
differ and the port does not say so.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from recipec.compiler import catalog
from recipec.compiler.miniature.small_checkpoint import shrink, write_checkpoint
from recipec.compiler.parity.compare import read_trace
from recipec.port.keys import words
from recipec.port.scripts.same_run_tools import TOOLS, Tool

ROOT = Path(__file__).resolve().parents[2]
HOOK = ROOT / "port" / "scripts" / "same_run_hook"
RECORD = ROOT / "port" / "scripts" / "same_run.json"
PAGE = ROOT / "port" / "same-run.md"
ROWS = 43
"""Not a multiple of a step's rows, so that the handling of an epoch's end shows."""
VOCABULARY = 521
"""A prime, larger than the tokenizer's 512."""
LIMIT = 1e-4
"""The largest difference of two losses in float32."""
RATE_LIMIT = 1e-6
"""The largest difference of two learning rates, as a share of the peak, because float32 rounds them."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Sample:
    """A sequence that attends only to itself: its tokens, and which of them are learned."""

    tokens: tuple[int, ...]
    learned: tuple[bool, ...]

    def learned_of(self) -> Sample:
        """Drop the tokens after the last learned one, which do not affect the loss."""
        end = max((at for at, learned in enumerate(self.learned, 1) if learned), default=len(self.tokens))
        return Sample(self.tokens[:end], self.learned[:end])


@dataclass
class Run:
    """The result of a run.

    Attributes:
        steps: the samples of each optimizer step.
        losses, rates: one value for each optimizer step.
    """

    steps: list[list[Sample]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


WORDS = sorted(words("river lamp seven baker rain garden oven wizard hill loaf answer weight shard poem dog"))


def write_rows(folder: Path, order: Sequence[int]) -> None:
    """Write the same rows in every form that a tool reads; each row's text contains its number."""
    conversations = [conversation(number) for number in order]
    chats = [{"messages": turns} for turns in conversations]
    plain = [dict(zip(("instruction", "output"), contents(turns), strict=False)) for turns in conversations]
    even = [
        {"instruction": f"#{n:02}# {n * 7 % 10} {n * 3 % 10}", "input": "", "output": f"{n % 10} {n // 10}"}
        for n in order
    ]
    pairs = [
        {"conversations": turns[:-1], "chosen": turns[-1], "rejected": spoken("assistant", number + 500, 7)}
        for number, turns in zip(order, conversations, strict=True)
    ]
    rejected = [
        {"messages": turns, "rejected_response": pair["rejected"]["content"]}
        for turns, pair in zip(conversations, pairs, strict=True)
    ]
    answers = [
        {"messages": pair["conversations"], "chosen": pair["chosen"], "rejected": pair["rejected"]}
        for pair in pairs
    ]
    forms: Mapping[str, Sequence[Row]] = {
        "chat": chats,
        "plain": [{**row, "input": ""} for row in plain],
        "split/train": [{**row, "input": ""} for row in plain],
        "split/val": [{**plain[0], "input": ""}],
        "even": even,
        "even_chat": [
            {"messages": [one("user", row["instruction"]), one("assistant", row["output"])]} for row in even
        ],
        "pairs": pairs,
        "rejected": rejected,
        "answers": answers,
    }
    (folder / "data" / "split").mkdir(exist_ok=True, parents=True)
    for name, rows in forms.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "data" / f"{name}.jsonl").write_text(lines)


def conversation(number: int) -> list[dict[str, str]]:
    """Return one or two questions with answers; every third conversation has a system text."""
    turns = [one("user", f"#{number:02}# {spoken('user', number, 4)['content']}")]
    turns += [spoken("assistant", number + 100, 3 + number % 9)]
    if number % 2:
        turns += [spoken("user", number + 200, 5), spoken("assistant", number + 300, 4)]
    return [*([spoken("system", number + 400, 3)] if number % 3 == 0 else []), *turns]


def spoken(role: str, seed: int, count: int) -> dict[str, str]:
    drawn = random.Random(seed)
    return one(role, " ".join(drawn.choice(WORDS) for _ in range(count)).capitalize() + ".")


def one(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def contents(turns: Sequence[Row]) -> list[str]:
    """Return the first question and its answer."""
    return [turn["content"] for turn in turns if turn["role"] != "system"][:2]


def run_tool(
    commands: Sequence[Sequence[str]], folder: Path, environment: Path, variables: Mapping[str, str]
) -> Run:
    """Run a tool's own commands, and read what it trained on."""
    seen = folder / "seen"
    (folder / "home").mkdir()
    process_variables = {
        name: os.environ[name] for name in ("LANG", "LC_ALL", "SSL_CERT_FILE") if name in os.environ
    }
    process_variables |= {
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "HOME": str(folder / "home"),
        "PYTHONPATH": str(HOOK),
        "SAME_RUN": str(seen),
        **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1"),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    for command in commands:
        program = str(environment / "bin" / command[0])
        called([program, *command[1:]], folder, folder / "tool.log", process_variables)
    return read_tool(folder)


def read_tool(folder: Path) -> Run:
    """Read what the hook recorded."""
    lines = [json.loads(line) for line in (folder / "seen" / "steps.jsonl").read_text().splitlines()]
    run = Run()
    for step in range(1, lines[-1]["step"] + 1):
        parts = [line for line in lines if line["step"] == step]
        run.steps.append([sample for part in parts for sample in samples(part)])
        run.losses.append(sum(part["loss"] for part in parts))
        run.rates.append(parts[-1]["rate"])
    return run


def samples(batch: Mapping[str, Any]) -> Iterator[Sample]:
    """Yield the samples of a tool's micro-batch; attention_mask is 0 on padding."""
    tokens = np.array(batch["input_ids"])
    within = np.array(batch.get("attention_mask") or np.ones_like(tokens))
    if within.ndim == 4:  # a mask of position pairs, 0 where one sees the other
        seen = within[:, 0] == 0
        apart = ~np.diagonal(seen, -1, 1, 2)
        within = np.diagonal(seen, 0, 1, 2) * np.cumsum(np.pad(apart, ((0, 0), (1, 0)), constant_values=1), 1)
    learned = (
        np.array(batch["labels"]) != -100 if "labels" in batch else np.array(batch["completion_mask"]) > 0
    )
    starts = np.zeros(tokens.shape, bool)
    starts[:, 1:] = within[:, 1:] != within[:, :-1]
    if "position_ids" in batch:
        positions = np.array(batch["position_ids"])
        starts[:, 1:] |= positions[:, 1:] != positions[:, :-1] + 1
    yield from cut(tokens, within > 0, learned, starts)


def cut(tokens: np.ndarray, real: np.ndarray, learned: np.ndarray, starts: np.ndarray) -> Iterator[Sample]:
    """Cut rows, [B, T] each, into samples; a sample's first token is not predicted."""
    for row in range(len(tokens)):
        bounds = [0, *np.flatnonzero(starts[row]).tolist(), tokens.shape[1]]
        for begin, end in itertools.pairwise(bounds):
            kept = [at for at in range(begin, end) if real[row, at]]
            if len(set(tokens[row, kept].tolist())) > 1:  # padding may form a piece by itself
                masks = (False, *(bool(learned[row, at]) for at in kept[1:]))
                yield Sample(tuple(tokens[row, kept].tolist()), masks)


def run_port(tool: Tool, folder: Path) -> Run:
    """Port the tool's files, and run the result from the tool's initial adapter."""
    recipe = str(Path(sys.executable).with_name("recipe"))
    log = folder / "port.log"
    files = [*tool.files, "--accelerator", "cpu-1", "--devices", "1", "--from", dialect(tool)]
    called([recipe, "port", *files, "-o", "recipe.yaml"], folder, log)
    changes = ["data.shuffle_seed=null", "checkpoint.every_steps=100", f"model.id=./{tool.place}"]
    if (folder / "seen" / "adapter").exists():
        changes.append("lora.start_from=seen/adapter")
    orders = [part for change in changes for part in ("--set", change)]
    called([recipe, "build", "recipe.yaml", "-o", "built", *orders], folder, log)
    (artifact,) = (folder / "built").glob("*/train.py")
    paths = ["--model", str(folder / tool.place), "--output", str(folder / "out-port")]
    options = ["--data-dir", str(folder), "--trace", str(folder / "trace.npz")]
    called([sys.executable, str(artifact), *paths, *options], folder, log)
    return read_port(folder)


def read_port(folder: Path) -> Run:
    """Read the results that train.py wrote."""
    trace = read_trace(folder / "trace.npz")
    run = Run(losses=trace.losses)
    for rows in trace.rows:
        flat = {name: array.reshape(-1, array.shape[-1]) for name, array in rows.items() if array.ndim > 1}
        segments = flat["segment_ids"]
        starts = np.zeros(segments.shape, bool)
        starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
        run.steps.append(list(cut(flat["tokens"], segments > 0, flat["loss_mask"], starts)))
    metrics = next((folder / "out-port").rglob("metrics.jsonl")).read_text().splitlines()
    run.rates = [entry["learning_rate"] for entry in map(json.loads, metrics) if "learning_rate" in entry]
    return run


def called(
    command: Sequence[str], folder: Path, log: Path, environment: Mapping[str, str] | None = None
) -> None:
    """Run a command in a folder, and append its output to a log.

    Raises:
        RuntimeError: the command failed; the message has the log's last lines.
    """
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        done = subprocess.run(
            command, cwd=folder, env=environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL
        )
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise RuntimeError(f"{command[0]} ended with {done.returncode}:\n{tail}")


def compared(tool: Run, port: Run) -> dict[str, str]:
    """Return the differences of two runs by quantity ("" for none), and the largest difference of losses."""
    differences = {}
    pairs = [
        ([sample.learned_of() for sample in a], [sample.learned_of() for sample in b])
        for a, b in zip(tool.steps, port.steps, strict=False)
    ]
    keys: Mapping[str, Callable[[Sample], Any]] = {
        "tokens": lambda sample: sample.tokens,
        "masks": lambda sample: sample,
    }
    for name, key in keys.items():
        wrong = [step for step, (a, b) in enumerate(pairs, 1) if Counter(map(key, a)) != Counter(map(key, b))]
        differences[name] = _places(wrong, pairs)
    counts = [len(tool.losses), len(port.losses)]
    differences["steps"] = "" if counts[0] == counts[1] else f"{counts[0]}, and {counts[1]} here"
    far = [abs(a - b) for a, b in zip(tool.rates, port.rates, strict=False)]
    differences["rates"] = _places(
        [n for n, apart in enumerate(far, 1) if apart > RATE_LIMIT * max(tool.rates)], far
    )
    losses = [abs(a - b) for a, b in zip(tool.losses, port.losses, strict=False)]
    differences["losses"] = _places([step for step, apart in enumerate(losses, 1) if apart > LIMIT], losses)
    return {**differences, "most": f"{max(losses):.0e}"}


def _places(wrong: Sequence[int], steps: Sequence[Any]) -> str:
    return f"{len(wrong)} of {len(steps)} steps" if wrong else ""


def replayed(run: Run, model: Path) -> list[int]:
    """Return the row numbers in the order in which a run first used them, followed by the others."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    order: list[int] = []
    for sample in (sample for step in run.steps for sample in step):
        marked = re.search(r"#(\d\d)#", tokenizer.decode(list(sample.tokens), skip_special_tokens=False))
        if marked and int(marked[1]) not in order:
            order.append(int(marked[1]))
    return [*order, *(number for number in range(ROWS) if number not in order)]


def dialect(tool: Tool) -> str:
    return {"ms-swift": "swift", "unsloth": "trl"}.get(tool.package, tool.package)


def same_run(tool: Tool, feature: str, environment: Path, folder: Path) -> dict[str, str]:
    """Run a tool and its port in a new folder, and compare them."""
    folder.mkdir(parents=True)
    config = shrink(catalog.entries()[tool.model]["config"]) | {"vocab_size": VOCABULARY}
    write_checkpoint(folder / tool.place, config, dtype="float32")
    tool.prepare(folder / tool.place)
    write_rows(folder, range(ROWS))
    for name, text in tool.beside.items():
        (folder / name).write_text(text)
    merged = {**tool.config, **tool.features[feature]}
    values = {key: value for key, value in merged.items() if value is not None}
    (folder / tool.files[0]).write_text(tool.write(values))
    (folder / "seen").mkdir()
    shutil.copy(folder / tool.place / "config.json", folder / "seen" / "config.json")
    commands = [*tool.before, tool.commands.get(feature, tool.command)]
    run = run_tool(commands, folder, environment, tool.environment)
    write_rows(folder, replayed(run, folder / tool.place))
    result = compared(run, run_port(tool, folder))
    statement, report = tool.says.get(feature, ""), " ".join((folder / "port.log").read_text().split())
    return {**result, "said": statement if statement in report else ""}


QUANTITIES = ("tokens", "masks", "steps", "rates", "losses")


def same(result: Mapping[str, str]) -> bool:
    """Return whether nothing differs."""
    return not any(result[name] for name in QUANTITIES)


def table(record: Mapping[str, Any]) -> str:
    """Return the record as Markdown."""
    names = {"rates": "learning rate"}
    lines = [
        f"| tool | feature | {' | '.join(names.get(name, name) for name in QUANTITIES)} | losses apart |",
        f"|---|---|{'---|' * (len(QUANTITIES) + 1)}",
    ]
    for tool, of_tool in record.items():
        for feature, result in of_tool["features"].items():
            cells = [result[name] or "same" for name in QUANTITIES]
            which = f"{tool} {of_tool['version']}, {of_tool['date']}"
            lines.append(f"| {which} | {feature} | {' | '.join(cells)} | {result['most']} |")
    return "\n".join(lines)


def page(text: str, record: Mapping[str, Any]) -> str:
    """Return port/same-run.md with the record's table, and the reports' sentences about differences."""
    lines = [
        f"- {tool}, {feature}: {result['said']}"
        for tool, of_tool in record.items()
        for feature, result in of_tool["features"].items()
        if result["said"]
    ]
    before, _, rest = text.partition(BEGINS)
    runs_table = "\n".join(
        [
            table(record),
            "",
            "A cell that is not `same` says how many steps differ. What differs, as the reports say it:",
            "",
            *lines,
        ]
    )
    return before + BEGINS + runs_table + ENDS + rest.partition(ENDS)[2]


BEGINS, ENDS = "<!-- same run -->\n", "\n<!-- end of same run -->"


def version(environment: Path, package: str) -> str:
    """Return a package's version in an environment."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    command = [str(environment / "bin" / "python"), "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def recorded() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return record


def run(arguments: argparse.Namespace) -> bool:
    """Run the requested features and record them; return whether the ports report every difference."""
    fine = True
    for name in arguments.tool or TOOLS:
        tool, environment = TOOLS[name], arguments.folder / name
        if not environment.exists():
            print(f"{name}: left out, for there is no {environment}")
            continue
        for feature in [name for name in tool.features if name in (arguments.feature or tool.features)]:
            with tempfile.TemporaryDirectory(prefix="same-run-") as place:
                folder = (arguments.keep or Path(place)) / name / feature.replace(" ", "-")
                try:
                    result = same_run(tool, feature, environment, folder)
                except RuntimeError as error:
                    print(name, feature, error, flush=True)
                    fine = False
                    continue
            fine &= same(result) or bool(result["said"])
            print(name, feature, result, flush=True)
            record = recorded()
            of_tool = record.setdefault(name, {"features": {}})
            of_tool |= {"version": version(environment, name), "date": f"{datetime.date.today()}"}
            of_tool["features"][feature] = result
            RECORD.write_text(json.dumps(record, indent=1) + "\n")
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("action", choices=("run", "write"))
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--tool", action="append", choices=TOOLS)
    parser.add_argument("--feature", action="append")
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    if arguments.action == "run":
        if arguments.folder is None:
            parser.error("run needs the folder of the environments")
        return 0 if run(arguments) else 1
    PAGE.write_text(page(PAGE.read_text(), recorded()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
