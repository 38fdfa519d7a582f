"""The sections of a recipe as plain classes, which scripts and runtime use: runtime/sections.py."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from recipec.spec import language
from recipec.spec.language import data, distill, images, reinforcement, section, train

PATH = "runtime/sections.py"

SECTIONS: tuple[type[section.Section], ...] = (
    train.Log,
    train.EarlyStopping,
    train.Generations,
    train.FakeQuantization,
    train.LocalCheckpoint,
    data.Source,
    images.Images,
    reinforcement.Grpo,
    distill.Distill,
    reinforcement.RewardLimits,
    reinforcement.Rollout,
    language.Lora,
    language.Data,
    language.Train,
    language.Checkpoint,
)
"""What a run reads, in the order of its classes: a section comes after the sections within it."""

ELSEWHERE: Mapping[type[section.Section], tuple[str, ...]] = {
    # Scripts build the optimizer and the schedule, and ModelSettings has what changes the model.
    language.Train: ("optimizer", "schedule", "trainable_modules", "qat"),
    # Another ModelSettings has the teacher.
    distill.Distill: ("teacher",),
    # LoraSettings has the numbers of the layers.
    language.Lora: ("layers",),
}
"""Keys that a script states in another place."""

SHORT = {data.Source: "str | Source"}
"""The types of sections that a script may write in a shorter form."""

WIDTH = 110
HEAD = '''\
"""The sections of a recipe that a run reads, as scripts state them.

Generated from the language by `python -m scripts.docs`. settings.py has their methods, and what only the
compiler can determine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
'''


def text() -> str:
    """Return the text of runtime/sections.py."""
    source = "\n\n".join([HEAD, *map(_class, SECTIONS)])
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", PATH, "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


def _class(section: type[section.Section]) -> str:
    fields = {
        key: value for key, value in section.model_fields.items() if key not in ELSEWHERE.get(section, ())
    }
    meanings = [_meaning(key, value) for key, value in fields.items()]
    lines = [f"    {key}: {_declared(value)}" for key, value in fields.items()]
    about = textwrap.fill(inspect.cleandoc(section.__doc__ or ""), WIDTH - 4)
    docstring = textwrap.indent(f'"""{about}\n\nAttributes:\n' + "\n".join(meanings) + '\n"""', "    ")
    return "\n".join(["@dataclass(frozen=True)", f"class {section.__name__}:", docstring, "", *lines, ""])


def _meaning(key: str, value: FieldInfo) -> str:
    """Return the lines of a docstring about one field."""
    meaning = re.split(r" (?:Unit: |Default: |Required\.)", value.description or "")[0]
    return textwrap.fill(
        f"{key}: {meaning}",
        WIDTH - 4,
        initial_indent="    ",
        subsequent_indent="        ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _declared(value: FieldInfo) -> str:
    default = _default(value)
    kind = _type(value.annotation)
    return kind if default is None else f"{kind} = {default}"


def _default(value: FieldInfo) -> str | None:
    """Return the source of a field's default, None for a required one.

    The compiler has resolved a default that depends on other keys. Here it is None, or the one
    without them.
    """
    if value.is_required():
        return None
    if value.default_factory is None:
        return repr(value.default)
    if value.default_factory_takes_validated_data:
        return "None" if NoneType in get_args(value.annotation) else repr(value.default_factory({}))
    default = value.default_factory()  # type: ignore[call-arg]
    if isinstance(default, section.Section):
        return f"field(default_factory={type(default).__name__})"
    if isinstance(default, dict):
        assert not default
        return "field(default_factory=dict)"
    return repr(tuple(default))


def _type(annotation: Any) -> str:
    """Return the source of a field's type: texts for choices, tuples for lists, and classes for sections."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return "str"
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(_union(arguments)))
    if origin is list:
        return f"tuple[{_type(arguments[0])}, ...]"
    if origin is dict:
        return f"Mapping[{_type(arguments[0])}, {_type(arguments[1])}]"
    if annotation is NoneType:
        return "None"
    return SHORT.get(annotation) or annotation.__name__


def _union(arguments: tuple[Any, ...]) -> Iterator[str]:
    for argument in arguments:
        yield from _type(argument).split(" | ")


if __name__ == "__main__":
    (Path(__file__).resolve().parents[2] / PATH).write_text(text(), encoding="utf-8")
