"""Flags of `vllm serve`: what the pinned version's parser takes, and the words that a recipe's values become.

compiler/data/vllm.json is made from the parser itself by scripts/vllm_flags.py. Types there: switch (no
value), int, float, text; size (an integer, or one such as 8k or 2M), size-or-auto; json (any JSON), object
(a JSON object of known keys), json-or-text; folded (a choice, in any case and with - for _).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent.parent / "data" / "vllm.json"


@dataclass(frozen=True)
class Flag:
    """A flag.

    Attributes:
        name: without dashes before it: "max-model-len".
        type: as above.
        choices: what alone is taken, as text; () where anything is.
        nargs: "+" or "*" for several words, "?" where the value may be left out, None for one.
        optional: whether the text None stands for no value.
        negated: whether there is a --no- form.
        aliases, short: other names, and those with a single dash.
        keys: of an object: null, choices, or keys of its own.
    """

    name: str
    type: str
    choices: tuple[str, ...] = ()
    nargs: str | None = None
    optional: bool = False
    negated: bool = False
    aliases: tuple[str, ...] = ()
    short: tuple[str, ...] = ()
    keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def many(self) -> bool:
        return self.nargs in ("+", "*")


@cache
def catalogue() -> dict[str, Any]:
    """vllm.json; read when it is first asked for."""
    data: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return data


@cache
def flags(command: str = "serve") -> dict[str, Flag]:
    """The flags of `vllm serve`, or of `vllm bench serve` ("bench"), by name and by alias."""
    out: dict[str, Flag] = {}
    for name, data in catalogue()[command].items():
        given: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in data.items()
        }
        flag = Flag(name, **given)
        out |= dict.fromkeys((name, *flag.aliases), flag)
    return out


def version() -> str:
    """Of the vllm-tpu that the flags are of."""
    return str(catalogue()["packages"]["vllm-tpu"])


def dashed(name: str) -> str:
    """A recipe's name of a flag as the command line has it: keys behind the first dot stay as they are."""
    head, dot, keys = name.partition(".")
    return head.replace("_", "-") + dot + keys


def by_flag(extra_args: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's `serve.extra_args` by the names of the flags."""
    return {dashed(str(name)): value for name, value in extra_args.items()}


def words(name: str, value: Any) -> list[str]:
    """The words of a flag on the command line; none for null.

    Args:
        name: as in a recipe: "max_model_len", "compilation-config.mode".
        value: true and false give --NAME and --no-NAME.
    """
    flag = dashed(name)
    if value is None:
        return []
    if "." in flag:
        word = _dotted(value)
        return [f"--{flag}={word}"] if word.startswith("-") else [f"--{flag}", word]
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, list) and not takes_json(flag):
        return [f"--{flag}", *map(word_of, value)]
    word = word_of(value)
    # Apart, what starts with a dash would be read as a flag.
    return [f"--{flag}={word}"] if word.startswith("-") else [f"--{flag}", word]


def takes_json(name: str) -> bool:
    known = flags().get(name)
    return known is not None and known.type in ("json", "json-or-text", "object") and not known.many


def word_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _dotted(value: Any) -> str:
    """A key's value: vLLM reads it as JSON, as a size such as 8k, and as text where it is neither."""
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False) if is_json(value) or is_size(value) else value


def find(name: str) -> Flag | None:
    """The flag of a name with dashes, its --no- form too."""
    known = flags().get(name)
    if known is None and name.startswith("no-"):
        positive = flags().get(name.removeprefix("no-"))
        known = positive if positive is not None and positive.negated else None
    return known


def is_size(word: str) -> bool:
    """Whether it is a number with a unit: 1k and 1.5k are thousands, 1K is 1024."""
    return re.fullmatch(r"\d+(\.\d+)?[kmgt]|\d+[KMGT]", word) is not None


def is_json(word: str) -> bool:
    return json_fault(word) is None


def json_fault(word: str) -> str | None:
    """Why a word is no JSON, and at which of its characters; None where it is some."""
    try:
        json.loads(word)
    except json.JSONDecodeError as error:
        return f"{error.msg}, character {error.pos + 1}"
    except (ValueError, RecursionError):
        return "nested too deep, or a number too long"
    return None
