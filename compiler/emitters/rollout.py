"""Emit rollout/serve.sh: the server that generates completions while train.py runs."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from recipec.compiler.emitters.places import is_hub_id
from recipec.compiler.lowering import pins
from recipec.compiler.render import render, shell_word
from recipec.compiler.vllm import features
from recipec.runtime.clients.hosts import is_loopback

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program

SCRIPT = "rollout/serve.sh"


def emit_rollout(program: Program) -> dict[str, str]:
    """Return the script that starts the server; {} unless a server generates the run's completions."""
    if not has_server(program):
        return {}
    return {
        SCRIPT: render(
            SCRIPT,
            model=program.recipe.model.id,
            hub=is_hub_id(program.recipe.model.id),
            key=not is_loopback(urlsplit(program.recipe.rollout.url).hostname or ""),
            flags=_flags(program),
            vllm=pins.sets()["serve"]["vllm-tpu"],
        )
    }


def has_server(program: Program) -> bool:
    """Return whether a server generates the run's completions."""
    return program.recipe.train.grpo is not None and program.recipe.rollout.engine == "vllm"


def _flags(program: Program) -> list[tuple[str, ...]]:
    """Return the flags that the run needs, each with its value as a shell word."""
    recipe, parts = program.recipe, urlsplit(program.recipe.rollout.url)
    here = is_loopback(parts.hostname or "")
    values: dict[str, str | None] = {
        "host": "127.0.0.1" if here else "0.0.0.0",
        "port": str(parts.port or {"http": 80, "https": 443}[parts.scheme]),
        "revision": recipe.model.revision if is_hub_id(recipe.model.id) else None,
        "dtype": recipe.model.dtype,
        "max-model-len": str(recipe.data.max_length),
        "enable-lora": "",
        "max-lora-rank": str(features.max_lora_rank(recipe)),
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
    }
    return [
        (f"--{flag}", *([shell_word(value)] if value else []))
        for flag, value in values.items()
        if value is not None
    ]
