"""serve/bench.sh: the recipe's sweep, as flags of the client that measures it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiler.emitters.folders import assignment
from compiler.render import render, shell_word
from compiler.serving.bench import bench_flags
from compiler.serving.container import MODEL, container
from compiler.serving.weights import Weights

if TYPE_CHECKING:
    from compiler.program import Program


def emit_bench(program: Program) -> dict[str, str]:
    """The benchmark's script; none without a `serve` section."""
    recipe, accelerator = program.recipe, program.serve_accelerator
    if recipe.serve is None or accelerator is None:
        return {}
    server = container(recipe, program.family.name)
    benchmark = recipe.benchmark
    text = render(
        "serve/bench.sh",
        accelerator=accelerator.name,
        points=len(benchmark.input_lengths) * len(benchmark.request_rates),
        hub=shell_word(server.model.address) if not server.model.local else None,
        weights=_weights(server.model, server.name),
        model=MODEL,
        lines=[[shell_word(word) for word in line] for line in bench_flags(recipe, accelerator)],
    )
    return {"serve/bench.sh": text}


def _weights(weights: Weights, name: str) -> list[str]:
    """Lines that set `model` to the folder of the weights on a bare machine, where serve.sh has it too."""
    if weights.kind == "folder" and not weights.address:
        return ['model="${MODEL_DIR:?names the folder of the weights}"']
    return assignment("model", weights, name)
