"""The place of a tool's data set, the content of its rows, and their longest length."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from recipec.port.engine import Says, Statements
from recipec.port.keys import Keys
from recipec.port.ledger import Ledger, Verdict
from recipec.port.meaning import model_names
from recipec.port.refusals import E1143
from recipec.port.source import Source, Sources

FILES = (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".array_record")
"""Suffixes of files that a recipe reads, also followed by .gz or .zst."""
REPOSITORY = r"[\w.-]+(/[\w.-]+)?"


@dataclass(frozen=True)
class Place:
    """A data set's place.

    Attributes:
        path: the path for `data.train[].path`; None if a recipe cannot name the place.
        note: why it cannot, or how the place differs; "" for neither.
    """

    path: str | None
    note: str = ""


def place(path: str, data_files: str | Sequence[str] | None = None) -> Place:
    """Return the recipe's source for the arguments of `datasets.load_dataset`, or of a tool's own loader.

    Args:
        path: a hub id, a file, a folder or a URL; with `data_files`, the name of a reader ("json").
        data_files: separate files, or files of the repository.
    """
    files = [data_files] if isinstance(data_files, str) else list(data_files or ())
    if files:
        if len(files) > 1:
            return Place(None, "recipec makes each of the data_files a source of its own")
        inside = files[0]
        if path in ("json", "csv", "parquet", "arrow") or is_local(path) or inside.startswith("/"):
            return place(inside)
        if re.fullmatch(REPOSITORY, path) and is_file(inside) and not re.search(r"[*?\[{]|\.\.|^/|:", inside):
            return Place(f"hf://datasets/{path}/{inside}")
        return Place(None, f"files of a repository ({inside}): download them and name them as a source")
    if path.startswith("hf://"):
        return Place(path)
    if path.startswith(("gs://", "gcs://")):
        return Place("gs://" + path.partition("://")[2])
    if "://" in path:
        return Place(
            None, f"recipec does not read {path.partition('://')[0]}://, so copy it to a folder or to gs://"
        )
    if is_local(path):
        return Place(path)
    if re.fullmatch(REPOSITORY, path):
        return Place(f"hf://{path}")
    return Place(None, "neither a file nor an id of the Hugging Face Hub")


SAMPLES = {
    "sft": '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}',
    "kto": '{"prompt": "Hi", "completion": "Hello", "label": true}',
}
"""A line of a file of rows, by objective."""
PAIR = '{"prompt": "Hi", "chosen": "Hello", "rejected": "No"}'
"""The same for the other objectives, which compare two answers."""


def elsewhere(key: str, objective: str = "sft") -> str:
    """Return the help for rows that something else names: how to name them, with a line of a sample file."""
    return (
        f"--set {key}=OWNER/NAME, or --set {key}=data/train.jsonl, a file with lines such as\n"
        f"  {SAMPLES.get(objective, PAIR)}"
    )


def is_local(path: str) -> bool:
    """Return whether a path is a local file or folder, from its beginning and end. Nothing is looked up."""
    if path.startswith(("./", "../", "/", "~")):
        return True
    return is_file(path, ".txt") or path.count("/") > 1


def is_file(path: str, *more: str) -> bool:
    """Return whether a path ends as a file that a recipe reads, or with one of `more` suffixes."""
    ends = [suffix for suffix in PurePosixPath(path).suffixes if suffix not in (".gz", ".zst")]
    return bool(ends) and ends[-1] in (*FILES, *more)


def source(
    path: str, split: str | None = None, config: str | None = None, limit: int | None = None
) -> dict[str, Any] | str:
    """Write an entry of `data.train` in its shortest form.

    A file has no splits, so its rows are the split train, and `train[:100]` is its first rows. It has no
    configurations either: what names one there also names the file.
    """
    single = not path.startswith("hf://") or is_file(path)
    config = None if single else config
    if split is not None and single:
        first = re.fullmatch(r"train\[:(\d+)\]", split)
        split, limit = None if first or split == "train" else split, int(first[1]) if first else limit
    entry: dict[str, Any] = {"path": path}
    for key, value in (("split", split), ("config", config), ("limit", limit)):
        if value is not None:
            entry[key] = value
    return path if len(entry) == 1 else entry


def given(keys: Keys, key: str, help: str, config: str | None) -> Statements[Any]:
    """Return the source for a section with arguments of `datasets.load_dataset`, or None after an error."""
    name, files, split = keys.text(key), keys.value("data_files"), keys.text("split")
    located = place(name or "", files if isinstance(files, str | list) else None)
    if name is None or located.path is None:
        yield keys.refuse(
            key, E1143, f"recipec cannot read this source: {located.note or f'it names no {key}'}", help
        )
        return None
    hub = located.path.startswith("hf://")
    return source(located.path, None if split == "train" else split, config if hub else None)


def unwritten(keys: Keys, data: Mapping[str, Any]) -> Keys:
    """Make Keys for settings that the tool contains, in no file of the port. `retold` reports on them."""
    source = Source(Path(keys.source.file), keys.source.file, data)
    return Keys(Ledger(Sources(source)), source, keys.tool)


def retold(keys: Keys, key: str, described: Keys) -> Statements[str]:
    """Report what became of the keys of `unwritten`. Errors are moved to the key that asks for them."""
    for item in described.ledger.diagnostics:
        yield keys.refuse(key, item.code, item.message, item.help or "")
        yield keys.withdraw(key)
    differs = (Verdict.APPROXIMATED, Verdict.UNSUPPORTED)
    notes = (item.note for item in described.ledger.findings if item.verdict in differs)
    return "; ".join(dict.fromkeys(filter(None, notes)))


ROWS_HELD_OUT = (
    "recipec holds out a number of rows only of .jsonl files at hand, and of a single data set of the hub; a "
    "share, such as 0.05, becomes data.eval_fraction"
)
FIRST = "recipec takes the first rows; the tool draws as many"


def evaluation(keys: Keys, size: float | int, seed: int) -> tuple[dict[str, Any], str]:
    """Convert the part of the rows to hold out: `val_set_size`, `val_size`.

    Args:
        size: a share in (0, 1), or a number of rows.
        seed: of the choice of rows.

    Returns:
        The recipe's values and a note; {} if a recipe cannot hold the rows out.
    """
    if 0 < size < 1:
        return {"data.eval_fraction": float(size), "data.eval_seed": seed}, ""
    sources = keys.ledger.value("data.train") or []
    rows = _counted(sources, keys.source.path.parent)
    if rows is not None and 1 <= size < rows:
        shares = (math.floor(size / rows * 10**digits) / 10**digits for digits in range(1, 16))
        share = next((candidate for candidate in shares if math.ceil(candidate * rows) == size), None)
        if share is not None:
            return {"data.eval_fraction": share, "data.eval_seed": seed}, f"{size:g} of the rows at hand"
    first = sources[0] if len(sources) == 1 else {}
    entry = {"path": first} if isinstance(first, str) else dict(first)
    split = entry.get("split", "train")
    whole = size >= 1 and size == int(size) and "limit" not in entry and "[" not in split
    path = entry.get("path", "")
    if not whole or not path.startswith("hf://") or path.startswith("hf://datasets/"):  # a file has no splits
        return {}, ""
    parts = (f"{split}[{int(size)}:]", f"{split}[:{int(size)}]")
    train, held = ([{**entry, "split": part}] for part in parts)
    return {"data.train": train, "data.eval": held}, FIRST


def _counted(sources: Sequence[Any], folder: Path) -> int | None:
    """Count the rows of JSON lines that are all at hand, or return None."""
    count = 0
    try:
        for entry in sources:
            place = folder / (entry if isinstance(entry, str) else entry["path"])
            limited = not isinstance(entry, str) and "limit" in entry
            if limited or place.suffix != ".jsonl" or not place.is_file():
                return None
            with place.open("rb") as file:
                count += sum(1 for line in file if line.strip())
    except (OSError, ValueError):
        return None
    return count


MOST = 1 << 20
"""The number of a file's bytes that are read."""


def first_row(path: str, folder: Path) -> dict[str, Any] | None:
    """Return the first row of a JSON or JSON Lines file, or of the first such file of a folder."""
    place = folder / Path(path).expanduser()
    try:
        if place.is_dir():
            files = sorted(file for file in place.iterdir() if file.suffix in (".jsonl", ".json"))
            place = files[0] if files else place
        if place.suffix not in (".jsonl", ".json") or not place.is_file():
            return None
        with place.open(encoding="utf-8") as file:
            head = file.read(MOST)
        row, _ = json.JSONDecoder().raw_decode(head.lstrip().removeprefix("[").lstrip())
    except (OSError, ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


NO_LIMIT = 4096
"""The row length in tokens if the tool has no limit. A recipe needs one, and reports longer samples."""


def unlimited(keys: Keys) -> int:
    """Return the row length if the tool has no limit: at most the model's positions."""
    named = keys.ledger.value("model.id")
    model = None if named is None else model_names.resolve(str(named), keys.source.path.parent).model
    most = None if model is None else model.positions()
    return NO_LIMIT if most is None else min(NO_LIMIT, most)


def length(keys: Keys, key: str, note: str = "") -> Says:
    """State the length at which samples are cut off. The note says how the tool cuts them differently."""
    most = keys.integer(key) if keys.given(key) or not keys.stands(key) else None
    if most is None:
        sets = {"data.max_length": unlimited(keys), "data.overlong": "error"}
        note = "the tool has no limit; recipec stops at a longer sample, and does not truncate it"
        if keys.stands(key):
            yield keys.differs(key, sets, note)
        else:
            yield keys.say(key, sets, note)
    else:
        yield keys.say(key, {"data.max_length": most, "data.overlong": "truncate"}, note)
    if str(keys.value("truncation_mode") or "keep_start") == "keep_start":
        yield keys.same("truncation_mode", note="the end is truncated")
    yield keys.unless("truncation_mode", ("keep_start",), "recipec truncates the end, not the start")


WINDOWS = "recipec shuffles and packs rows within windows of this size: another order of samples"
KEPT = "rows come in the sources' order, as in the tool; recipec packs them within windows of this size"


def say_stream(
    keys: Keys, switch: str, buffers: Sequence[str] = (), size: int = 1000, on: bool | None = None
) -> Says:
    """State a switch for streaming, after all other keys of the data and of the run's length.

    Args:
        buffers: keys for the number of rows to shuffle among; the first one in the file counts.
        size: the number of these rows if no key gives it.
        on: whether the run streams, regardless of the switch; None reads the switch.
    """
    ledger = keys.ledger
    if not on and not keys.flag(switch):
        yield keys.same(switch, note="off: all rows are read first, as in recipec")
        yield from keys.unused(buffers, f"the tool does not read it without {switch}")
        return
    why = None
    if not ledger.value("train.steps"):
        why = "the file gives no number of steps, which streaming in recipec needs"
    elif ledger.value("data.eval_fraction"):
        why = "the run holds out a share of the rows, which requires counting them"
    if why is not None:
        yield keys.unless(switch, (False,), f"recipec reads all rows first: {why}")
        yield from keys.unused(buffers, "recipec reads all rows first")
        return
    buffer = next((key for key in buffers if keys.given(key)), buffers[0] if buffers else None)
    rows = keys.integer(buffer) if buffer is not None else None
    sets = {"data.stream_window": rows if rows and rows > 0 else size}
    yield keys.sets("data.stream_window", sets["data.stream_window"])
    note = KEPT if ledger.value("data.shuffle_seed", 0) is None else WINDOWS
    yield keys.say(switch, sets if keys.given(switch) else None, note)
    for key in buffers:
        yield keys.same(key, sets if key == buffer else None)
