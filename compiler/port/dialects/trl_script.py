"""Which of TRL's scripts a file is for: the one that has all of its keys, and reads its rows."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any

from compiler.port import known
from compiler.port.keys import Keys, words
from compiler.port.meaning import rows
from compiler.port.source import Source
from compiler.wording import listing
from spec.diagnostics import Diagnostic
from spec.document import Refused

SCRIPTS = ("sft", "dpo", "orpo")
"""The scripts that recipes have a counterpart of, by their sections."""

EXPERIMENTAL = "experimental."
"""What sections of scripts begin with that are no command of `trl`."""

_SHARED = ("script", "model", "mixture", "dataset")

_PAIRS = words(
    "max_prompt_length max_completion_length generate_during_eval is_encoder_decoder padding_value"
)
_PROMPTS = words("max_prompt_length")
OLDER = {"dpo": _PAIRS, "kto": _PAIRS, "orpo": _PROMPTS, "grpo": _PROMPTS, "rloo": _PROMPTS}
"""Keys that a script had in earlier versions."""

NEEDED = {"distillation": "teacher_model_name_or_path"}
"""A key without which a script does not start."""

LOSSES = {
    "sft": words("nll chunked_nll dft"),
    "dpo": words(
        """sigmoid sigmoid_norm hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_pair
        aot_unpaired apo_zero apo_down discopop sft kto_pair"""
    ),
    "kto": words("kto apo_zero_unpaired"),
    "grpo": words("grpo dapo bnpo dr_grpo luspo cispo sapo vespo"),
}
"""The values of `loss_type` that tell a script."""

COLUMNS: tuple[tuple[frozenset[str], tuple[str, ...]], ...] = (
    (words("chosen rejected"), ("dpo", "orpo", "reward")),
    (words("prompt completion label"), ("kto",)),
    (words("prompt completion"), ("sft",)),
    (words("messages"), ("sft",)),
    (words("conversations"), ("sft",)),
    (words("text"), ("sft",)),
    (words("prompt"), ("grpo", "rloo")),
)
"""The columns of rows, and whose they are; the first that all stand in a row tell."""


def told(keys: Keys, chosen: str | None) -> str:
    """The script that the file is for, one of SCRIPTS.

    Args:
        chosen: by --script; keys that it does not have are then errors each.

    Raises:
        Refused: the file is for another script, or for any of several.
    """
    if chosen is not None:
        _refuse(keys, chosen)
        return chosen
    source = keys.source
    used = _used(source)
    having = [script for script in _commands() if all(script in readers for readers in used.values())]
    having = [script for script in having if NEEDED.get(script, "") in ("", *used)]
    foreign = [key for key, readers in used.items() if not readers.intersection(SCRIPTS)]
    if foreign or (having and not set(having).intersection(SCRIPTS)):
        raise Refused(_another(source, used, having or _nearest(used, foreign), foreign or [*used]))
    where, fitting = _reading(keys, having)
    if len(fitting) == 1 and fitting[0] in SCRIPTS:
        return fitting[0]
    if fitting and not set(fitting).intersection(SCRIPTS):
        raise Refused(_another(source, used, fitting, [where]))
    raise Refused(_untold(source, used, fitting))


@functools.cache
def _own() -> Mapping[str, frozenset[str]]:
    """The keys of each script, without those that every script has."""
    sections = known.tools()["trl"]["sections"]
    shared = {*known.keys("trainer", "training_arguments"), *known.keys("trl", *_SHARED)}
    return {name: frozenset(sections[name]) - shared for name in sections if name not in _SHARED}


def _commands() -> list[str]:
    """The scripts that are no experiments."""
    return [name for name in _own() if not name.startswith(EXPERIMENTAL)]


def _having(key: str) -> set[str]:
    """The scripts that have a key; none for one that they all have, or that none has today."""
    having = {name for name, own in _own().items() if key in own}
    return having and having | {name for name, older in OLDER.items() if key in older}


def _used(source: Source) -> dict[str, set[str]]:
    """The keys of the file that tell scripts from each other, with the scripts that have them."""
    used: dict[str, set[str]] = {}
    for key, value in source.data.items() if isinstance(source.data, dict) else ():
        having = _having(str(key)) if value is not None else set()
        if key == "loss_type":
            having = having & _losing(value) or having
        if not having.issuperset(_commands()) and having:
            used[str(key)] = having
    return used


def _losing(value: Any) -> set[str]:
    """The scripts that have a loss; of several at once, dpo."""
    if isinstance(value, list):
        return {"dpo"}
    return {script for script, losses in LOSSES.items() if str(value) in losses}


def _reading(keys: Keys, scripts: list[str]) -> tuple[str, list[str]]:
    """The key of the data set; and of some scripts those that read its rows, where they are at hand."""
    where, path = _rows(keys)
    row = (rows.first(path, keys.source.path.parent) if path else None) or {}
    readers = next((readers for columns, readers in COLUMNS if columns <= set(row)), ())
    return where, [script for script in scripts if script in readers] or scripts


def _rows(keys: Keys) -> tuple[str, str | None]:
    """The key that says where the first data set lies, and what it says."""
    entries = keys.value("datasets")
    entry = entries[0] if isinstance(entries, list) and entries else None
    if not isinstance(entry, dict):
        name = keys.value("dataset_name")
        return "dataset_name", name if isinstance(name, str) else None
    files = entry.get("data_files")
    one = files[0] if isinstance(files, list) and files else files
    return "datasets", next((path for path in (one, entry.get("path")) if isinstance(path, str)), None)


def _refuse(keys: Keys, chosen: str) -> None:
    """Refuses what the chosen script does not have."""
    for key in keys.source.data if isinstance(keys.source.data, dict) else ():
        having = _having(str(key))
        if having and chosen not in having and keys.given(key):
            message = f"`{key}` is no key of TRL's {chosen} script, but of {_named(having)}"
            others = [f"--script {script}" for script in SCRIPTS if script in having]
            keys.refuse(key, "E1171", message, listing([f"--set {key}=null", *others], "or"))
        elif having and chosen not in having:
            keys.same(key, note="null: as without the key")


def _nearest(used: Mapping[str, set[str]], foreign: list[str]) -> Iterable[str]:
    """Scripts that have all keys of a file, or else those that have the first foreign one."""
    every = [name for name in _own() if all(name in readers for readers in used.values())]
    return every or used[foreign[0]]


def _another(
    source: Source, used: Mapping[str, set[str]], scripts: Iterable[str], keys: list[str]
) -> Diagnostic:
    """The file is for a script that has no counterpart, as keys tell."""
    alone = not used.get(keys[0], set()).intersection(SCRIPTS)
    told = listing(f"`{key}`" for key in (keys[:1] if alone else keys))
    rows = "" if keys[0] in used else "the rows of "
    message = f"this is a run of TRL's {_named(scripts)} script, by {rows}{told}"
    lost = {script: [key for key in used if script not in used[key]] for script in SCRIPTS}
    nearest = min(SCRIPTS, key=lambda script: len(lost[script]))
    ways = "".join(f" --set {key}=null" for key in lost[nearest])
    help = f"a recipe trains as TRL's {listing(SCRIPTS, 'or')} does; if this is one: --script {nearest}{ways}"
    return Diagnostic("E1171", message, keys[0], help, source.place(keys[0]))


def _untold(source: Source, used: Mapping[str, set[str]], fitting: list[str]) -> Diagnostic:
    """The file may be for several scripts, or for none."""
    ways = [script for script in SCRIPTS if script in fitting] or list(SCRIPTS)
    help = f"say which one it is: {listing((f'--script {script}' for script in ways), 'or')}"
    if fitting:
        message = f"{source.file} may be for several scripts of TRL: {_named(fitting)}"
        return Diagnostic("E1172", message, help=help, span=source.top())
    pairs = (
        pair for pair in combinations(used, 2) if not used[pair[0]].intersection(used[pair[1]], _commands())
    )
    clash = next(pairs, tuple(used))
    message = f"no script of TRL has {listing(f'`{key}`' for key in clash)} together"
    return Diagnostic("E1172", message, clash[-1], help, source.place(clash[-1]))


def _named(scripts: Iterable[str]) -> str:
    """Scripts by their names: the commands of `trl` alone where some are among them."""
    found = set(scripts)
    commands = [name for name in _commands() if name in found]
    return listing(commands or sorted(name.removeprefix(EXPERIMENTAL) for name in found), "or")
