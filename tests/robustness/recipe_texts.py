"""Recipes for fuzzing: made from the JSON Schema, nearly valid ones, and damaged texts and bytes."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from recipec.spec.schema import json_schema

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Case:
    """A recipe's file, the file that it may extend, and `--set` arguments."""

    recipe: bytes
    base: bytes | None = None
    sets: tuple[str, ...] = ()


BASES: tuple[dict[str, Any], ...] = (
    {
        "recipe": 1,
        "name": "tiny",
        "model": {"id": "recipec/tiny-gemma4"},
        "mesh": {"accelerator": "cpu-8", "axes": {"fsdp": 4, "tp": 2}},
        "lora": {"rank": 8},
        "sharding": {"rules": [{"match": ".*down_proj.*", "spec": ["tp", "fsdp"]}]},
        "data": {"train": ["train.jsonl"], "eval": ["eval.jsonl"], "fields": {"messages": "conversation"}},
        "serve": {"extra_args": {"seed": 1}, "env": {"A": "b"}, "tensor_parallel_size": 2},
    },
    {
        "recipe": 1,
        "name": "small",
        "model": {"id": "google/gemma-3-270m-it"},
        "mesh": {"accelerator": "v5e-8", "axes": {"fsdp": 8}},
        "lora": {"rank": 8, "quantize": "nf4"},
        "data": {"train": [{"path": "train.jsonl", "weight": 2.0}], "max_length": 512},
        "train": {"steps": 10, "global_batch_size": 16},
    },
    {
        "recipe": 1,
        "name": "full",
        "model": {"id": "meta-llama/Llama-3.2-1B-Instruct"},
        "mesh": {"topology": "v6e:2x2", "axes": {"fsdp": 2, "tp": 2}},
        "data": {"train": ["hf://org/data"], "format": "prompt_completion", "loss_on": "completion"},
        "train": {"epochs": 2, "optimizer": {"name": "adafactor", "learning_rate": 1e-5}},
        "checkpoint": {"directory": "gs://bucket/run", "every_steps": 50},
    },
)
"""Recipes without errors that take little time."""

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 10**9, 10**30, 0.5, -0.0, 1e308, 1e-320),
    *(float("nan"), float("inf"), float("-inf")),
    *("", " ", "x", "null", "~", "~/x", "~nobodysuch/x", ".", "..", "../x", "/", "/etc/passwd", "a/../../b"),
    *("a\0b", "a\nb", "a\tb", "\x1b[2J", "\x7f", "\u2028", "\u202e", "\ufeff", "\ud800", "ü", "日本", "🙂"),
    *("(", "[", "*", ".*", "(a+)+$", "\\", "%s", "{x}", "{{ x }}", "{% x %}", "$(x)", "${HOME}", "`x`"),
    *('"', "'", '"""', "#", "# type: ignore", ": ", "- ", "&a", "*a", "!!int", "|", ">", "@", "%"),
    *("gs://", "gs://b", "hf://", "hf://a/b", "s3://b/x", "file:///x", "http://x", "x.jsonl", "x.parquet"),
    *("v5p-8", "v5e:2x4", "v5p:0x0x0", "cpu-1", "cpu-0", "cpu-999999999", "tpu7x-8", "v9-8"),
    *("1e3", "0x10", "1_000", "2001-01-01", "inf", "nan", "5GB", "0GB", "-5GB", "9" * 400 + "GB"),
    *("recipec/tiny-gemma4", "google/gemma-3-270m-it", "no/such-model", "a" * 300, "a/" * 2000),
    *([], {}, [None], [[]], [{}], {"": ""}, {"x": None}, {"a.b": 1}, {"[0]": 1}, ["x", "x"], [0, 0]),
)
"""Values that replace expected ones."""

PIECES = (
    *(": ", "- ", "? ", ", ", "&a ", "*a", "!!python/object:os.system ", "!x ", "<<: ", "{", "}", "[", "]"),
    *('"', "'", "|", ">", "|-\n", "#", " #", "%YAML 1.1\n", "%TAG ! x\n", "---\n", "...\n", "\t", "\n", "\r"),
    *("\r\n", "\0", "\x1b[31m", "\x85", "\u2028", "\ufeff", "\ufffe"),
    *("🙂", "ü", "null", "~", "1e999", "0x1F"),
    *(".inf", ".nan", "2001-01-01", "=", "`", "@", "[" * 50, "{a: " * 40, "9" * 5000, " " * 300, "extends: "),
    *("extends: base.yaml\n", "extends: recipe.yaml\n", "recipe: 2\n", "recipe: 1\n", "lora: {rank: 1}\n"),
    *("\\", '"\\ud800"', '"\\0"', '"\\x1b[2J"', "hf_" + "a" * 30, "${env:TOKEN}", "on", "012", "-", ":"),
)
"""Pieces that are inserted into a recipe's text."""

TEXTS = tuple(
    file.read_text(encoding="utf-8", errors="replace").replace("gemma-4-31B-it", "gemma-3-270m-it")
    for file in sorted((ROOT / "tests" / "golden").glob("*/recipe.yaml"))
    if file.stat().st_size < 3000
)

_NUMBER = st.integers(0, 9999)
_TEXT = st.integers(0, len(TEXTS) - 1)


def cases() -> st.SearchStrategy[Case]:
    """Generate recipes of every kind."""
    files = st.one_of(
        nearly_valid(1), nearly_valid(1), nearly_valid(3), from_schema(), tampered(), tampered(), not_utf8()
    )
    based = st.builds(lambda recipe, base: Case(b"extends: base.yaml\n" + recipe, base), files, files)
    plain = st.builds(Case, files)
    altered = st.builds(
        lambda recipe, sets: Case(recipe, None, tuple(sets)),
        nearly_valid(1),
        st.lists(settings(), min_size=1, max_size=3),
    )
    return st.one_of(plain, plain, based, altered)


def in_yaml(recipe: Any) -> bytes:
    """Write a tree as YAML, one section a line."""
    if not isinstance(recipe, dict):
        return _flow(recipe).encode("utf-8", "surrogatepass")
    lines = (f"{_flow(key)}: {_flow(value)}\n" for key, value in recipe.items())
    return "".join(lines).encode("utf-8", "surrogatepass")


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_flow(str(key))}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return {"nan": ".nan", "inf": ".inf", "-inf": "-.inf"}[str(value)]
    return json.dumps(value, ensure_ascii=False)


def nearly_valid(most: int) -> st.SearchStrategy[bytes]:
    """Generate a recipe without errors, and make up to `most` changes."""
    return st.builds(
        lambda number, changes: in_yaml(_changed(complete()[number], changes)),
        st.integers(0, len(BASES) + 1),
        st.lists(_changes(), min_size=0, max_size=most),
    )


Change = tuple[str, int, Any]


def _changes() -> st.SearchStrategy[Change]:
    """Generate a change: its kind, its place (a number, modulo the number of places), and its value."""
    where = st.integers(0, 499)
    return st.one_of(
        st.tuples(st.just("odd"), where, _NUMBER.map(lambda number: ODD[number % len(ODD)])),
        st.tuples(st.just("like"), where, st.integers(0, 2**16)),
        st.tuples(st.sampled_from(["remove", "misspell", "wrap", "swap", "add"]), where, st.integers(0, 499)),
    )


def _changed(recipe: dict[str, Any], changes: list[Change]) -> dict[str, Any]:
    recipe = copy.deepcopy(recipe)
    for how, number, what in changes:
        places = list(_places(recipe))
        if not places:
            break
        inside, key = places[number % len(places)]
        if how == "odd":
            inside[key] = copy.deepcopy(what)
        elif how == "like":
            inside[key] = _like(inside[key], what)
        elif how == "remove":
            del inside[key]
        elif how == "wrap":
            inside[key] = [inside[key]] if what % 2 else {"x": inside[key]}
        elif how == "swap":
            other, name = places[what % len(places)]
            if not isinstance(inside[key], dict | list) and not isinstance(other[name], dict | list):
                inside[key], other[name] = other[name], inside[key]
        elif isinstance(inside, dict):
            inside[f"{key[:-1]}x" if how == "misspell" else "more"] = inside[key]
    return recipe


def _like(value: Any, seed: int) -> Any:
    """Return another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return (value * 2, value + 1, value // 2, -value, value * 3, value * 1000)[seed % 6]
    if isinstance(value, float):
        return (value * 2, value / 3, -value, value * 1e9, value * 1e-9)[seed % 5]
    if isinstance(value, str) and value:
        at = seed % len(value)
        return (value[:at] + value[at + 1 :], value.upper(), value + value, value[:at] + "é" + value[at:])[
            seed % 4
        ]
    return value


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Return every key and index, with its mapping or list."""
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree))) if isinstance(tree, list) else []
    out: list[tuple[Any, Any]] = []
    for key in keys:
        out += [(tree, key), *_places(tree[key])]
    return out


@functools.cache
def complete() -> tuple[dict[str, Any], ...]:
    """Return BASES, and the first two with every key of the language."""
    from recipec.spec.load import load

    out = list(BASES)
    for base in BASES[:2]:
        recipe = load(Path("recipe.yaml"), (), in_yaml(base).decode()).recipe
        assert recipe is not None
        whole = recipe.model_dump(mode="json", by_alias=True)
        out.append({key: value for key, value in whole.items() if value is not None})
    return tuple(out)


@st.composite
def from_schema(draw: st.DrawFn) -> bytes:
    """Draw a recipe in which every value has the schema's type."""
    schema = _schema()
    made = _drawn(draw, schema | {"anyOf": None, "examples": []}, schema["$defs"])
    return in_yaml({"recipe": 1, "name": "made"} | made)


@functools.cache
def _schema() -> dict[str, Any]:
    return json_schema()


def _drawn(draw: st.DrawFn, schema: dict[str, Any], defs: dict[str, Any]) -> Any:
    """Draw a value of a schema's type."""
    if "$ref" in schema:
        return _drawn(draw, defs[schema["$ref"].rpartition("/")[2]], defs)
    if "const" in schema:
        return schema["const"]
    given = [*schema.get("examples", []), *([schema["default"]] if "default" in schema else [])]
    if given and draw(st.integers(0, 2)):
        return given[draw(st.integers(0, len(given) - 1))]
    for several in ("anyOf", "oneOf", "allOf", "enum"):
        if schema.get(several):
            part = schema[several][draw(st.integers(0, len(schema[several]) - 1))]
            return part if several == "enum" else _drawn(draw, part, defs)
    kind = schema.get("type")
    if kind == "object":
        named = schema.get("properties", {})
        if not named:
            return {draw(st.sampled_from(["a", "messages", "seed", "ü", ""])): ODD[draw(_NUMBER) % len(ODD)]}
        required = schema.get("required", [])
        kept = [key for key in named if key in required or draw(st.integers(0, 3)) == 0]
        return {key: _drawn(draw, named[key], defs) for key in kept}
    if kind == "array":
        return [_drawn(draw, schema.get("items", {}), defs) for _ in range(draw(st.integers(0, 2)))]
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum", -1))
        return low + draw(
            st.sampled_from([0, 1, 7, 63, 1023, 10**6] if kind == "integer" else [0, 1e-4, 0.5, 1])
        )
    if kind == "boolean":
        return draw(st.booleans())
    if kind == "null":
        return None
    return ODD[draw(_NUMBER) % len(ODD)]


def tampered() -> st.SearchStrategy[bytes]:
    """Generate the text of a recipe with pieces inserted, removed and moved."""
    edit = st.tuples(
        st.sampled_from(["insert", "insert", "replace", "cut", "repeat", "indent", "swap"]),
        st.integers(0, 9999),
        st.integers(1, 40),
        st.sampled_from(PIECES),
    )

    def apply(number: int, edits: list[tuple[str, int, int, str]]) -> bytes:
        text = TEXTS[number]
        for how, number, length, piece in edits:
            at = number % (len(text) + 1)
            lines = text.split("\n")
            line = number % len(lines)
            if how == "insert":
                text = text[:at] + piece + text[at:]
            elif how == "replace":
                text = text[:at] + piece + text[at + length :]
            elif how == "cut":
                text = text[:at] + text[at + length :]
            elif how == "repeat":
                text = text[:at] + text[at : at + length] * 2 + text[at + length :]
            elif how == "indent":
                lines[line] = " " * (length % 7) + lines[line].lstrip()
                text = "\n".join(lines)
            else:
                other = length % len(lines)
                lines[line], lines[other] = lines[other], lines[line]
                text = "\n".join(lines)
        return text.encode("utf-8", "surrogatepass")

    return st.builds(apply, _TEXT, st.lists(edit, min_size=1, max_size=4))


def not_utf8() -> st.SearchStrategy[bytes]:
    """Generate bytes, alone or within a recipe."""
    within = st.builds(
        lambda number, junk, at: (
            (data := TEXTS[number].encode())[: at % (len(data) + 1)] + junk + data[at % (len(data) + 1) :]
        ),
        _TEXT,
        st.binary(min_size=1, max_size=6),
        st.integers(0, 9999),
    )
    encoded = st.builds(
        lambda number, encoding: TEXTS[number].encode(encoding, "replace"),
        _TEXT,
        st.sampled_from(["utf-16", "utf-32", "utf-8-sig", "latin-1", "utf-7"]),
    )
    return st.one_of(within, encoded, st.binary(max_size=60))


def settings() -> st.SearchStrategy[str]:
    """Generate `--set` arguments."""
    paths = sorted({"name", "train.steps", "lora.rank", "data.train[0].path", "mesh.axes.fsdp", *_keys()})
    odd = st.sampled_from(
        ["", "x", "..", "a[", "a[0", "[0]", "data.train[9]", "name.x", "lora..rank", "extends"]
    )
    value = st.one_of(_NUMBER.map(lambda number: _flow(ODD[number % len(ODD)])), st.sampled_from(PIECES))
    equals = st.sampled_from(["=", "=", "=", " = ", "", "=="])
    path = st.one_of(st.sampled_from(paths), st.sampled_from(paths), odd)
    return st.builds(lambda path, equals, value: f"{path}{equals}{value}", path, equals, value)


def _keys() -> list[str]:
    schema = _schema()
    return [
        f"{section}.{key}"
        for section, part in schema["properties"].items()
        for key in schema["$defs"].get(part.get("$ref", "").rpartition("/")[2], {}).get("properties", {})
    ]
