"""Emit the scripts of serve/ that send requests to the server.

smoke.sh has the requests that test a new server before its clients use it, bench.sh the recipe's benchmark
sweep, eval.sh (with requirements-eval.txt) the recipe's prompts and tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from recipec.compiler.artifacts import wheel
from recipec.compiler.emitters.folders import assignment
from recipec.compiler.emitters.render import render, shell_word
from recipec.compiler.lowering import catalog, pins
from recipec.compiler.lowering.sources import asks_chats
from recipec.compiler.serving.bench import bench_flags
from recipec.compiler.serving.container import MODEL, container
from recipec.compiler.serving.weights import ServedWeights
from recipec.runtime.serving.evaluate_prompts import parse

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program
    from recipec.spec.language import Recipe


TAKEN = 3
"""The number of evaluation prompts that smoke.sh sends too."""

LONGEST = 200
"""The most characters of such a prompt, because it is part of a script."""


def emit_smoke(program: Program) -> dict[str, str]:
    """Return smoke.sh by its path; {} without a `serve` section."""
    recipe = program.recipe
    if recipe.serve is None:
        return {}
    server = container(recipe, program.family.name)
    text = render(
        "serve/smoke.sh",
        wheel=_wheel(program),
        url=server.health_url.removesuffix("/health"),
        name=server.name,
        base=f"{server.name}-base" if recipe.serve.weights == "adapter" else None,
        wait=server.startup_minutes,
        vllm=pins.sets()["serve"]["vllm-tpu"],
        api_key=server.api_key,
        text=not asks_chats(recipe),
        must_differ=recipe.serve.smoke_prompts,
        prompts=[] if recipe.serve.smoke_prompts else _evaluated(program),
    )
    return {"serve/smoke.sh": text}


def _wheel(program: Program) -> str | None:
    """Return the file that contains the scripts' modules; None if they are in runtime/."""
    return wheel.FILE if program.installs_runtime else None


def _evaluated(program: Program) -> list[str]:
    """Return the first short prompts of evaluate.prompts; [] if the file is elsewhere or cannot be read."""
    path = program.recipe.evaluate.prompts
    if path is None or "://" in path:
        return []
    chat = asks_chats(program.recipe)
    prompts, _ = parse(program.source.parent / path, chat)
    texts = (_turn(prompt.messages) if chat else prompt.text for prompt in prompts)
    return [text for text in texts if text and text.isprintable() and len(text) <= LONGEST][:TAKEN]


def _turn(messages: Sequence[Mapping[str, Any]] | None) -> str | None:
    """Return the text of a chat that is one turn of the user, else None."""
    turn = messages[0] if messages is not None and len(messages) == 1 else {}
    text = turn.get("content")
    return text if turn.get("role") == "user" and isinstance(text, str) else None


def emit_bench(program: Program) -> dict[str, str]:
    """Return the benchmark's script by its path; {} without a `serve` section."""
    recipe, accelerator = program.recipe, program.serve_accelerator
    if recipe.serve is None or accelerator is None:
        return {}
    server = container(recipe, program.family.name)
    benchmark = recipe.benchmark
    text = render(
        "serve/bench.sh",
        wheel=_wheel(program),
        accelerator=accelerator.name,
        points=len(benchmark.input_lengths) * len(benchmark.request_rates),
        hub=shell_word(server.model.address) if not server.model.local else None,
        weights=_served_folder(server.model, server.name),
        model=MODEL,
        lines=[[shell_word(word) for word in line] for line in bench_flags(recipe, accelerator)],
    )
    return {"serve/bench.sh": text}


def _served_folder(weights: ServedWeights, name: str) -> list[str]:
    """Return lines that set `model` to the folder of the weights on a VM without Docker, as serve.sh does."""
    if weights.kind == "folder" and not weights.address:
        return ['model="${MODEL_DIR:?names the folder of the weights}"']
    return assignment("model", weights, name)


PYTHON = "3.11 to 3.13"
"""The Python versions on which lm-eval's pinned packages install."""


def emit_evaluate(program: Program) -> dict[str, str]:
    """Return the files by path; {} without a `serve` section, or with nothing to evaluate."""
    recipe = program.recipe
    serve, evaluate = recipe.serve, recipe.evaluate
    if serve is None or not (evaluate.prompts or evaluate.tasks):
        return {}
    server = container(recipe, program.family.name)
    chat = asks_chats(recipe)
    files = {
        "serve/eval.sh": render(
            "serve/eval.sh",
            wheel=_wheel(program),
            url=server.health_url.removesuffix("/health"),
            name=server.name,
            base=f"{server.name}-base" if serve.weights == "adapter" else None,
            prompts=evaluate.prompts,
            text=not chat,
            samples=evaluate.samples,
            temperature=evaluate.temperature,
            max_tokens=evaluate.max_tokens,
            tasks=evaluate.tasks,
            task_api="chat" if chat else "completions",
            tokenizer=_tokenizer(recipe) if not chat else None,
            max_length=serve.max_model_len,
            limit=evaluate.limit,
        )
    }
    if evaluate.tasks:
        packages = pins.evaluation()
        files["requirements-eval.txt"] = render(
            "requirements-eval.txt", python=PYTHON, direct=packages.direct, transitive=packages.transitive
        )
    return files


def _tokenizer(recipe: Recipe) -> str | None:
    """Return lm-eval's tokenizer as a shell word: an id on the hub, or the folder of the merged weights.

    None if only the user who runs eval.sh knows it; then --tokenizer is required.
    """
    name = recipe.model.tokenizer or recipe.model.id
    if not (catalog.is_directory(name) or "://" in name or recipe.model.add_tokens):
        return shell_word(name)
    if "://" in recipe.merge.output:
        return None
    return '"$here/../"' + shell_word(recipe.merge.output)
