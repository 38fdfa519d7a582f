"""Flags of `vllm serve`: what the pinned version's parser accepts, and how a recipe's values are written.

`problems` finds what vLLM would reject in a recipe's flags, or read as something else.

scripts/vllm_flags.py generates compiler/data/vllm.json from the parser itself. The file has these types:
switch (no value), int, float, text; size (an integer, or one such as 8k or 2M), size-or-auto; json (any),
object (a JSON object of known keys), json-or-text; folded (a choice, in any case and with - for _).
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from recipec.compiler.wording import listing

DATA = Path(__file__).parent.parent / "data" / "vllm.json"


@dataclass(frozen=True)
class Flag:
    """A flag of vLLM's command line.

    Attributes:
        name: without leading dashes: "max-model-len".
        type: one of the types above.
        choices: the only accepted values, as text; () if every value of the type is accepted.
        nargs: "+" or "*" for several words, "?" if the value may be left out, None for one.
        optional: whether the text None means that there is no value.
        negated: whether there is a --no- form.
        aliases, short: other names with two dashes, and those with one dash.
        keys: of an object, the known keys: None, choices, or nested keys for each.
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
def catalog() -> dict[str, Any]:
    """Return the content of vllm.json; it is read on the first call."""
    data: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return data


@cache
def flags(command: str = "serve") -> dict[str, Flag]:
    """Return the flags of `vllm serve`, or of `vllm bench serve` ("bench"), by name and by alias."""
    out: dict[str, Flag] = {}
    for name, data in catalog()[command].items():
        entries: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in data.items()
        }
        flag = Flag(name, **entries)
        out |= dict.fromkeys((name, *flag.aliases), flag)
    return out


def version() -> str:
    """Return the version of vllm-tpu that the flags belong to."""
    return str(catalog()["packages"]["vllm-tpu"])


def dashed(name: str) -> str:
    """Return a recipe's flag name as the command line spells it; keys after the first dot do not change."""
    head, dot, keys = name.partition(".")
    return head.replace("_", "-") + dot + keys


def by_flag(extra_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's `serve.extra_args`, keyed by the names of vLLM's flags."""
    return {dashed(str(name)): value for name, value in extra_args.items()}


def words(name: str, value: Any) -> list[str]:
    """Return the words of a flag on the command line; none for null.

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
    if isinstance(value, list) and not _takes_json(flag):
        return [f"--{flag}", *map(_word_of, value)]
    word = _word_of(value)
    # As a separate word, a value that starts with a dash would be read as a flag.
    return [f"--{flag}={word}"] if word.startswith("-") else [f"--{flag}", word]


def _takes_json(name: str) -> bool:
    known = flags().get(name)
    return known is not None and known.type in ("json", "json-or-text", "object") and not known.many


def _word_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _dotted(value: Any) -> str:
    """Return a key's value as text, which vLLM reads as JSON, as a size such as 8k, or as plain text."""
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False) if _is_json(value) or _is_size(value) else value


def find(name: str) -> Flag | None:
    """Return the flag with this name, in dashes; also accept its --no- form."""
    known = flags().get(name)
    if known is None and name.startswith("no-"):
        positive = flags().get(name.removeprefix("no-"))
        known = positive if positive is not None and positive.negated else None
    return known


def _is_size(word: str) -> bool:
    """Return whether the word is a number with a unit: 1k and 1.5k are decimal thousands, 1K is 1024."""
    return re.fullmatch(r"\d+(\.\d+)?[kmgt]|\d+[KMGT]", word) is not None


def _is_json(word: str) -> bool:
    return _json_fault(word) is None


def _json_fault(word: str) -> str | None:
    """Return why a word is not valid JSON, with the position of the error; None if it is valid."""
    try:
        json.loads(word)
    except json.JSONDecodeError as error:
        return f"{error.msg}, character {error.pos + 1}"
    except (ValueError, RecursionError):
        return "nested too deep, or a number too long"
    return None


EXAMPLES = {
    "int": "a whole number",
    "float": "a number",
    "size": "a whole number, or one such as 8k",
    "size-or-auto": "a whole number, or auto",
    "json": "JSON",
    "json-or-text": "JSON",
    "object": "a mapping",
}
"""A description of the value that each type needs."""

MOST_LISTED = 12
"""The most keys of a configuration that a message lists."""

RENAMED: Mapping[str, str] = {
    "guided-decoding-backend": "structured-outputs-config.backend",
    "disable-log-requests": "no-enable-log-requests",
    "enable-reasoning": "reasoning-parser",
    "task": "runner",
    "max-seq-len-to-capture": "max-cudagraph-capture-size",
    "num-speculative-tokens": "spec-tokens",
    "speculative-model": "spec-model",
    "tp": "tensor-parallel-size",
    "dp": "data-parallel-size",
}
"""Names from earlier versions, and short names that take a single dash, with their current names."""


@dataclass(frozen=True)
class FlagProblem:
    """A problem with a flag of a recipe.

    Attributes:
        kind: "unknown", "abbreviated", "value", or "key" (of a configuration).
        message: a sentence, without the position in the file.
        help: what to write instead.
        flag: the flag that an abbreviated name stands for.
        keys: position of the error within the flag's mapping; () for the flag itself.
        at_key: whether the name of the flag or key is wrong, rather than the value.
    """

    kind: str
    message: str
    help: str
    flag: Flag | None = None
    keys: tuple[str, ...] = ()
    at_key: bool = False


def problems(name: str, value: Any) -> Iterator[FlagProblem]:
    """Yield what vLLM would reject in a flag, or read as something else.

    Args:
        name: as in a recipe, well-formed.
        value: of `serve.extra_args`.
    """
    flag, _, path = dashed(name).partition(".")
    known = find(flag)
    if known is None:
        yield _unknown(name, flag)
    elif path:
        yield from _key_problems(name, known, path.split("."), value)
    elif value is not None:
        negative = flag == f"no-{known.name}"
        if negative and not isinstance(value, bool):
            yield _valued(name, known)
        elif negative and value is False:
            meant = f"write `{_spelled(name, known.name)}: true`"
            yield FlagProblem("value", f"`{name}: false` negates twice", meant, at_key=True)
        elif problem := _refused(known, name, value):
            yield problem


def abbreviated(name: str) -> list[Flag]:
    """Return the flags that argparse would accept an unknown name for: those that start with it."""
    if find(name) is not None:
        return []
    matches = {flag.name: flag for start, flag in flags().items() if start.startswith(name)}
    if name.startswith("no-"):
        rest = name.removeprefix("no-")
        matches |= {f.name: f for start, f in flags().items() if f.negated and start.startswith(rest)}
    return list(matches.values())


def _unknown(name: str, flag: str) -> FlagProblem:
    if flag in RENAMED:
        return _renamed(flag, _spelled(name, RENAMED[flag]))
    short = next((known.name for known in flags().values() if flag in known.short), None)
    if short is not None:
        return _renamed(flag, _spelled(name, short))
    stands_for = abbreviated(flag)
    if len(stands_for) == 1:
        full = ("no-" if flag.startswith("no-") and stands_for[0].negated else "") + stands_for[0].name
        return FlagProblem(
            "abbreviated",
            f"`{name}` is the beginning of --{full}, which vLLM takes it for until a version has another "
            "such",
            f"did you mean `{_spelled(name, full)}`?",
            stands_for[0],
            at_key=True,
        )
    known = sorted({known for flag in flags().values() for known in _names(flag)})
    close = [flag.name for flag in stands_for[:3]] or difflib.get_close_matches(flag, known, 3, 0.75)
    spelled = [_spelled(name, candidate) for candidate in close]
    suggestion = f"did you mean {listing((f'`{word}`' for word in spelled), 'or')}?" if close else None
    return FlagProblem(
        "unknown",
        f"vLLM {version()} has no flag --{flag}",
        suggestion or f"`vllm serve --help=all` of vllm-tpu {version()} lists them",
        at_key=True,
    )


def _renamed(flag: str, name: str) -> FlagProblem:
    message = f"vLLM {version()} has no flag --{flag}"
    return FlagProblem("unknown", message, f"did you mean `{name}`?", at_key=True)


def _names(flag: Flag) -> Iterator[str]:
    yield from (flag.name, *flag.aliases)
    if flag.negated:
        yield f"no-{flag.name}"


def _spelled(name: str, flag: str) -> str:
    """Return a flag's name in the spelling that this recipe uses."""
    return flag.replace("-", "_") if "_" in name or "-" not in name else flag


def _valued(name: str, flag: Flag) -> FlagProblem:
    other = f"or false for --no-{flag.name}" if flag.negated else "or leave it out"
    return FlagProblem("value", f"`{name}` is a switch and takes no value", f"{name}: true, {other}")


def _refused(flag: Flag, name: str, value: Any) -> FlagProblem | None:
    """Return what is wrong with the value of a flag whose name is written in full."""
    if flag.type == "switch":
        if not isinstance(value, bool):
            return _valued(name, flag)
        if not value and not flag.negated:
            message = f"`{name}` is off unless it is given, and there is no --no-{flag.name}"
            return FlagProblem("value", message, "remove it", at_key=True)
        return None
    if isinstance(value, bool):
        if value and flag.nargs == "?":
            return None
        message = "takes a value" if value else f"has no form --no-{flag.name}"
        return FlagProblem("value", f"`{name}` {message}", f"give {_asks(flag)}, or remove it")
    if isinstance(value, list) and (flag.many or not _takes_json(flag.name)):
        if not flag.many and len(value) != 1:
            return FlagProblem("value", f"`{name}` takes one value, not a list", f"give {_asks(flag)}")
        if not value and flag.nargs == "+":
            message = f"`{name}` is an empty list, and takes at least one value"
            return FlagProblem("value", message, f"give {_asks(flag)}, or remove it")
    if isinstance(value, list) and not _takes_json(flag.name):
        listed = [_word_of(item) for item in value]
        dashes = [word for word in listed if word.startswith("-") and not re.fullmatch(r"-\d+", word)]
        if dashes:
            return FlagProblem(
                "value",
                f"`{name}` holds `{dashes[0]}`, which vLLM takes for another flag because it starts with a "
                "dash",
                "in a list, no value may start with a dash, except a negative whole number",
            )
    else:
        listed = [_word_of(value)]
    mapping = isinstance(value, dict)
    return next((problem for word in listed if (problem := _misread(flag, name, word, mapping))), None)


def _misread(flag: Flag, name: str, word: str, mapping: bool) -> FlagProblem | None:
    """Return what is wrong with one word of a flag's value.

    Args:
        mapping: whether the recipe writes the value as a mapping; the word is then its JSON.
    """
    if flag.optional and word in ("", "None"):
        return None
    if not _readable(flag.type, word):
        fault = _json_fault(_numbers(word)) if flag.type in ("json", "json-or-text", "object") else None
        message = f"`{name}` is `{word}`, which is not {EXAMPLES[flag.type]}" + (
            f" ({fault})" if fault else ""
        )
        return FlagProblem("value", message, f"give {_asks(flag)}")
    compared = word.lower().replace("-", "_") if flag.type == "folded" else word
    if flag.type == "int" and flag.choices:
        compared = str(int(word))
    if flag.choices and compared not in flag.choices:
        close = difflib.get_close_matches(compared, flag.choices, 1, 0.6)
        first = f"did you mean `{close[0]}`? " if close and len(flag.choices) > 4 else ""
        return FlagProblem(
            "value", f"`{name}` cannot be `{word}`", f"{first}it can be {listing(flag.choices, 'or')}"
        )
    if flag.type == "object":
        problem = next(_unknown_keys(name, flag.keys, json.loads(_numbers(word))), None)
        # In a mapping, the key has a position in the file; within a text it has none.
        return problem if problem is None or mapping else replace(problem, keys=(), at_key=False)
    return None


def _asks(flag: Flag) -> str:
    if flag.choices:
        return listing(flag.choices, "or")
    return EXAMPLES.get(flag.type, "a text")


def _readable(kind: str, word: str) -> bool:
    """Return whether a word can be read as a type, by the same functions as Python's and vLLM's parsers."""
    if kind == "int":
        return _reads(int, word)
    if kind == "float":
        return _reads(float, word)
    if kind == "size":
        return _is_size(word.strip()) or _reads(int, word)
    if kind == "size-or-auto":
        return word.strip().lower() == "auto" or _readable("size", word)
    if kind == "json":
        return _is_json(word)
    if kind == "object":
        expanded = _numbers(word)
        return _is_json(expanded) and isinstance(json.loads(expanded), dict)
    if kind == "json-or-text":
        return not re.fullmatch(r"(?s)\s*\{.*\}\s*", word) or _is_json(word)
    return True


def _reads(kind: type[int] | type[float], word: str) -> bool:
    try:
        kind(word)
    except ValueError:
        return False
    return True


def _numbers(word: str) -> str:
    """Replace numbers with units in JSON by plain numbers of the same length; their values do not matter."""
    parts = re.split(r'("(?:[^"\\]|\\.)*")', word)
    plain = [
        re.sub(r"\b\d+(?:\.\d+)?[kKmMgGtT]\b", lambda number: "1".ljust(len(number[0])), part)
        for part in parts[::2]
    ]
    parts[::2] = plain
    return "".join(parts)


def _key_problems(name: str, flag: Flag, path: list[str], value: Any) -> Iterator[FlagProblem]:
    """Yield the problems of a key of a flag, as in `compilation-config.mode`."""
    if flag.type not in ("json", "json-or-text", "object"):
        message = f"--{flag.name} has no keys: it takes {_asks(flag)}"
        yield FlagProblem("value", message, f"did you mean `{_spelled(name, flag.name)}`?", at_key=True)
        return
    if "" in path:
        message = f"a key of `{name}` is empty"
        yield FlagProblem("key", message, "write for example compilation-config.mode: 3", at_key=True)
        return
    if value is None:
        return
    nested: Any = value
    for key in reversed(path):
        nested = {key: nested}
    if flag.type == "object":
        for problem in _unknown_keys(name, flag.keys, nested):
            # Keys after a dot are part of the flag's name in the recipe.
            yield replace(problem, keys=problem.keys[len(path) :])


def _unknown_keys(
    name: str, known: Mapping[str, Any], values: Mapping[str, Any], above: tuple[str, ...] = ()
) -> Iterator[FlagProblem]:
    """Yield unknown keys of a configuration, at any depth, and values that are not among the choices.

    Args:
        above: the keys that lead to the given keys.
    """
    for key, value in values.items():
        keys = (*above, key)
        if key not in known:
            close = difflib.get_close_matches(key, known, 1, 0.6)
            listed = f"it has {listing(known)}" if len(known) <= MOST_LISTED else "see vLLM's documentation"
            suggestion = f"did you mean `{close[0]}`?" if close else listed
            message = f"`{name}`: the configuration has no key `{key}`"
            yield FlagProblem("key", message, suggestion, keys=keys, at_key=True)
        elif isinstance(known[key], dict) and isinstance(value, dict):
            yield from _unknown_keys(name, known[key], value, keys)
        elif isinstance(known[key], list) and value is not None and str(value) not in known[key]:
            yield FlagProblem(
                "key",
                f"`{name}`: `{key}` cannot be `{_word_of(value)}`",
                f"it can be {listing(known[key], 'or')}",
                keys=keys,
            )
