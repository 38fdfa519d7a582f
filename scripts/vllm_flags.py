"""Write the catalog of vLLM-TPU's flags, compiler/data/vllm.json, from vLLM's own parsers.

It runs with the interpreter of the serving environment, where this project is not installed:

    build/serve-0.32.0/bin/python scripts/vllm_flags.py > compiler/data/vllm.json

It writes nothing that differs between machines: no defaults, no help texts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from importlib import metadata
from typing import Any, Literal, get_args, get_origin

OFFLINE = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "SKIP_JAX_PRECOMPILE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Environment that keeps vLLM from contacting a TPU, the hub or any other service."""

TYPES = {"int": "int", "float": "float", "str": "text", "loads": "json", "parse_reasoning_parser": "text"}
TYPES |= {"human_readable_int": "size", "human_readable_int_or_auto": "size-or-auto"}
TYPES |= {"union_dict_and_str": "json-or-text", "parse_dataclass": "object"}
"""Types by the name of the function that reads a value; compiler/vllm/flags.py explains them."""

DEPTH = 3
"""How deep to read configurations within a configuration."""


def main() -> int:
    # A library may print during import; stdout is only for the catalog.
    out, sys.stdout = sys.stdout, sys.stderr
    os.environ.update(OFFLINE)
    out.write(text(catalog()))
    return 0


def catalog() -> dict[str, Any]:
    """Return the contents of the file as plain values."""
    import vllm.envs
    from tpu_inference import envs as tpu_envs
    from vllm.entrypoints.cli.benchmark.serve import BenchmarkServingSubcommand
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    bench = FlexibleArgumentParser()
    BenchmarkServingSubcommand.add_cli_args(bench)
    names = sorted(vllm.envs.environment_variables)
    return {
        "packages": {name: metadata.version(name) for name in ("vllm-tpu", "tpu-inference")},
        "serve": flags(make_arg_parser(FlexibleArgumentParser())),
        "bench": flags(bench),
        "tool_parsers": sorted(ToolParserManager.list_registered()),
        "reasoning_parsers": sorted(ReasoningParserManager.list_registered()),
        "environment": {
            "vllm": names,
            "tpu_inference": sorted(set(tpu_envs.environment_variables) - set(names)),
        },
    }


def text(flags: dict[str, Any]) -> str:
    """Return the file's text, one flag a line, so that a new version's changes can be read."""
    sections = []
    for title, value in flags.items():
        if title in ("serve", "bench"):
            lines = [f"{json.dumps(name)}: {json.dumps(flag)}" for name, flag in value.items()]
            body = "{\n  " + ",\n  ".join(lines) + "\n }"
        elif isinstance(value, dict):
            lines = [f"{json.dumps(key)}: {json.dumps(inner)}" for key, inner in value.items()]
            body = "{\n  " + ",\n  ".join(lines) + "\n }"
        else:
            body = json.dumps(value)
        sections.append(f" {json.dumps(title)}: {body}")
    return "{\n" + ",\n".join(sections) + "\n}\n"


def flags(parser: argparse.ArgumentParser) -> dict[str, dict[str, Any]]:
    """Return every flag by its long name without dashes, sorted."""
    out = {}
    for action in parser._actions:
        names = [option.removeprefix("--") for option in action.option_strings if option.startswith("--")]
        if not names or isinstance(action, argparse._HelpAction):
            continue
        out[names[0]] = flag(action, names)
    return dict(sorted(out.items()))


def flag(action: argparse.Action, names: list[str]) -> dict[str, Any]:
    """Describe what one flag takes; leave out keys without information."""
    short = [option.lstrip("-") for option in action.option_strings if not option.startswith("--")]
    negated = f"no-{names[0]}"
    aliases = [name for name in names[1:] if name != negated]
    described: dict[str, Any] = {"type": "switch"}
    if action.nargs != 0:
        kind, optional, keys = kind_of(action.type)
        choices = [choice for choice in action.choices or () if choice is not None]
        described = {"type": kind}
        if choices:
            described["choices"] = [str(choice) for choice in sorted(choices)]
        if action.nargs is not None:
            described["nargs"] = action.nargs
        if optional:
            described["optional"] = True
        if keys is not None:
            described["keys"] = keys
    if negated in names:
        described["negated"] = True
    if aliases:
        described["aliases"] = aliases
    if short:
        described["short"] = short
    return described


def kind_of(reads: Any) -> tuple[str, bool, dict[str, Any] | None]:
    """Return a type's name, whether the text None means no value, and the keys of a configuration.

    Raises:
        SystemExit: the function is unknown; read the new version's source.
    """
    if reads is None:
        return "text", False, None
    name = getattr(reads, "__name__", "")
    if name in ("_optional_type", "_parse_type"):
        (inner,) = [cell.cell_contents for cell in reads.__closure__]
        kind, _, keys = kind_of(inner)
        return kind, name == "_optional_type", keys
    if name == "parse_dataclass":
        return "object", False, keys_of(reads.__defaults__[0])
    if name in TYPES:
        return TYPES[name], False, None
    if name == "<lambda>" and reads("A-B") == "a_b":
        return "folded", False, None
    if name == "<lambda>" and reads("1,x") == [1, "x"]:
        return "text", False, None
    if "benchmark" in reads.__module__:
        return "text", False, None
    raise SystemExit(
        f"error: nothing is known of {reads.__module__}.{reads.__qualname__}, which reads a flag"
    )


def keys_of(config: Any, depth: int = DEPTH) -> dict[str, Any]:
    """Return a configuration's keys: each with its choices, its own keys, or null if anything is allowed."""
    return {
        field.name: within(field.type, depth)
        for field in sorted(dataclasses.fields(config), key=lambda field: field.name)
        if field.init
    }


def within(hint: Any, depth: int) -> Any:
    if get_origin(hint) is Literal:
        return sorted(map(str, get_args(hint)))
    parts = [part for part in get_args(hint) if part is not type(None)] or [hint]
    if len(parts) == 1 and get_origin(parts[0]) is Literal:
        return sorted(map(str, get_args(parts[0])))
    if len(parts) == 1 and dataclasses.is_dataclass(parts[0]) and depth > 1:
        return keys_of(parts[0], depth - 1)
    return None


if __name__ == "__main__":
    sys.exit(main())
