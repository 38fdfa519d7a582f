"""`recipe serve verify`: whether an endpoint serves the checkpoint that it is meant to serve."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.serving.flags import by_flag
from compiler.sources import asks_chats
from compiler.terminal import note

if TYPE_CHECKING:
    from compiler.serving.verify_endpoint import Case, Reply
    from compiler.serving.verify_reference import ServedTypes, Tokens
    from runtime.serving.client import Client
    from spec.language import Recipe

LONGEST = 1200
"""Tokens of the long prompt at most; more takes a model of 31B minutes on a CPU."""

LONG = 257
"""Its tokens where no layer has a sliding window."""


def verify(
    url: str,
    artifact: Path | None = None,
    model: Path | None = None,
    name: str | None = None,
    prompts: Path | None = None,
    tokens: int = 16,
    tolerance: float | None = None,
    dtype: str = "float32",
    server_dtype: str | None = None,
) -> dict[str, Any]:
    """Compares an endpoint with a checkpoint; the arguments are the command's.

    Returns:
        Plain data, as --json prints it; "problems" is empty when the endpoint is the checkpoint.

    Raises:
        UserError, ArtifactError: when nothing can be compared.
    """
    from compiler.serving import verify_compare, verify_endpoint, verify_reference
    from runtime.serving.client import Client

    client = Client(url, timeout=600.0)
    recipe = _recipe(artifact) if artifact is not None else None
    folder = model or _merged(artifact, recipe)
    config = verify_reference.read_config(folder)
    served, longest = verify_endpoint.find_model(client, name or (recipe.name if recipe else None), "--name")
    types = served_types(recipe, config, server_dtype)
    verify_reference.torch()
    verify_reference.refuse_too_large(folder, dtype)
    tokenizer = verify_reference.Tokens(folder)
    window = verify_reference.sliding_window(config)
    cases = verify_endpoint.built_in(
        _long_repeats(tokenizer, window, longest, tokens), tokenizer.has_template
    )
    cases += _own(prompts, recipe, tokenizer) if prompts else []
    room = None if longest is None else longest - tokens
    cases = [case for case in cases if room is None or len(_ids(case, tokenizer)) <= room]
    replies, refused = _replies(client, served, cases, tokens)
    note(f"{url}: {len(replies)} prompts answered; loading {folder} in {dtype}")
    reference = verify_reference.Reference(folder, config, dtype)
    compared = verify_compare.compare(replies, tokenizer, reference, types, dtype)
    allowed = verify_compare.tolerance(compared, types, dtype, tolerance)
    values = [value for one in compared for step in one.steps for value in step.differences]
    return {
        "url": client.url,
        "model": served,
        "checkpoint": str(folder),
        "reference": f"transformers in {dtype}",
        "server": {"types": str(types), "source": types.source, "vllm": client.version()},
        "tolerance": {
            "largest": allowed.largest,
            "mean": None if allowed.mean == float("inf") else allowed.mean,
            "source": allowed.source,
        },
        "largest": max(values, default=None),
        "mean": sum(values) / len(values) if values else None,
        "prompts": [verify_compare.as_data(one, allowed) for one in compared],
        "problems": [*refused, *verify_compare.problems(compared, allowed, tokenizer)],
    }


def report(result: dict[str, Any]) -> str:
    """The result as text: a table of prompts, and the verdict."""
    rows = [("prompt", "kind", "tokens", "same prompt", "same answer", "largest", "mean")]
    for row in result["prompts"]:
        same = "yes" if row["parts_at"] is None else f"no, from token {row['parts_at']}"
        if row["parts_at"] is None and row["ties"]:
            same = f"yes, {row['ties']} ties" if row["ties"] > 1 else "yes, a tie"
        rows.append(
            (
                _printable(row["prompt"]),
                row["kind"],
                f"{row['prompt_tokens']} + {row['tokens']}",
                "yes" if row["same_prompt"] else "no",
                same,
                f"{row['largest']:.2g}",
                f"{row['mean']:.2g}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    allowed, server = result["tolerance"], result["server"]
    mean = "" if allowed["mean"] is None else f", mean {allowed['mean']:.2g}"
    lines += [
        "",
        f"server: {result['model']} at {result['url']}, {server['types']} ({server['source']})",
        f"reference: {result['reference']} on {result['checkpoint']}",
        f"allowed: largest {allowed['largest']:.2g}{mean}: {allowed['source']}",
    ]
    if result["largest"] is not None:
        lines.append(f"found: largest {result['largest']:.2g}, mean {result['mean']:.2g}")
    lines += [f"problem: {problem}" for problem in result["problems"]]
    verdict = "the endpoint is not this checkpoint" if result["problems"] else "the same model"
    lines.append(f"verdict: {verdict}")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def served_types(recipe: Recipe | None, config: dict[str, Any], given: str | None) -> ServedTypes:
    """In which types the server computes: by the option, the recipe's flags, or the checkpoint."""
    from compiler.serving.verify_reference import ServedTypes, config_dtype

    serve = recipe.serve if recipe else None
    if given is not None:
        return ServedTypes(given, source="--server-dtype")
    flags = by_flag(serve.extra_args) if serve else {}
    dtype, source = str(flags.get("dtype", "auto")), "the recipe's flags"
    if dtype in ("auto", "half", "float"):
        named = {"half": "float16", "float": "float32"}.get(dtype)
        dtype = named or _automatic(config_dtype(config))
        source = "the recipe's flags" if named else "vLLM's choice for the checkpoint's dtype"
    if serve is None:
        return ServedTypes(dtype, source=source)
    return ServedTypes(dtype, serve.kv_cache_dtype, serve.quantization, "the recipe's flags")


def _automatic(dtype: str) -> str:
    """vLLM's --dtype auto: the checkpoint's own, and 16 bits for one in float32."""
    return "bfloat16" if dtype == "float32" else dtype


def _recipe(artifact: Path) -> Recipe:
    from compiler.serving.artifacts import open_artifact

    opened = open_artifact(artifact)
    for line in opened.notes:
        note(f"note: {line}")
    return opened.recipe


def _merged(artifact: Path | None, recipe: Recipe | None) -> Path:
    """Where merge.py leaves the merged weights."""
    from runtime.errors import UserError

    assert artifact is not None and recipe is not None
    output = recipe.merge.output
    if "://" in output:
        raise UserError(
            f"the merged weights are at {output}", "copy them here, and name the folder: --model DIR"
        )
    return artifact / output


def _long_repeats(tokenizer: Tokens, window: int | None, longest: int | None, tokens: int) -> int:
    """How often the sentence stands in the long prompt: past the sliding window, where there is room."""
    from compiler.serving.verify_endpoint import SENTENCE

    wanted = min(LONGEST, LONG if window is None else window + 57)
    if longest is not None:
        wanted = min(wanted, longest - tokens - 16)
    each = max(1, len(tokenizer.of_text(SENTENCE * 2)) - len(tokenizer.of_text(SENTENCE)))
    return max(0, wanted // each + (window is not None and window + 57 <= wanted))


def _own(path: Path, recipe: Recipe | None, tokenizer: Tokens) -> list[Case]:
    from compiler.serving.verify_endpoint import Case
    from runtime.errors import UserError
    from runtime.serving.evaluate_prompts import parse

    chat = tokenizer.has_template and (recipe is None or asks_chats(recipe))
    prompts, faults = parse(path, chat, expected=False)
    if faults:
        place = str(path) if faults[0].line is None else f"{path}:{faults[0].line}"
        raise UserError(f"{place}: {faults[0].message}", faults[0].help)
    return [Case(prompt.title, prompt.text, prompt.messages) for prompt in prompts]


def _ids(case: Case, tokenizer: Tokens) -> Sequence[int]:
    return tokenizer.of_text(case.text or "") if case.messages is None else tokenizer.of_chat(case.messages)


def _replies(
    client: Client, served: str, cases: Sequence[Case], tokens: int
) -> tuple[list[Reply], list[str]]:
    """The endpoint's answers, and a sentence when it refuses a chat, for which there is a template."""
    from compiler.serving.verify_endpoint import ask
    from runtime.progress import each
    from runtime.serving.client import ServerError

    replies, refused = [], []
    for case in each("asking the endpoint", cases):
        try:
            replies.append(ask(client, served, case, tokens))
        except ServerError as error:
            if error.status != 400 or case.kind != "chat":
                raise
            refused.append(f"the server has another chat template: it refuses a chat: {error.message}")
    return replies, refused[:1]


def _printable(text: str) -> str:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)
