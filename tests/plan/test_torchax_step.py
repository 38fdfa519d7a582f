"""Tests of train_torchax.py's step on abstract arrays, against transformers and the compiler's totals."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest

from recipec.compiler import catalog
from recipec.compiler.lowering.backend import Backend
from recipec.compiler.lowering.program import Program
from recipec.compiler.miniature.fewer_layers import with_layers
from recipec.compiler.plan.depth import shortened
from recipec.compiler.plan.planner import placements
from tests.plan.plans import abstract, lowered

RECIPE = """\
recipe: 1
name: example
model: {id: google/gemma-3-270m-it, attention: splash}
mesh: {accelerator: v5p-16, axes: {fsdp: 4, tp: 2}}
lora: {rank: 4, dropout: 0.1}
data: {train: [gs://bucket/train.jsonl], max_length: 512, chat_template: "{{ messages }}"}
train: {steps: 10, global_batch_size: 8, optimizer: {learning_rate: 3.0e-4}}
sharding: {on_indivisible: replicate}
"""


@pytest.fixture
def program(tmp_path: Path) -> Program:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return lowered(path)


def test_abstract_torchax_step_has_the_bytes_of_one_device(program: Program) -> None:
    made, _ = abstract(program, range(program.architecture.num_layers), Backend.TORCHAX)
    found = placements(program, Backend.TORCHAX)
    adapters = sum(p.bytes for p in found if ".lora_" in p.pattern)
    weights = sum(p.bytes for p in found) - adapters
    # The rest are float32 rotary frequencies of both layer kinds, and the embedding's factor.
    assert 0 < made.sizes.weights - weights < 5_000
    assert made.sizes.adapters == pytest.approx(adapters, rel=1e-9)
    # Adam's two moments, and gradients accumulated over two micro-batches.
    assert made.sizes.optimizer == pytest.approx(3 * adapters, rel=1e-3)
    # Tokens, positions and segments of one row in int32, its mask, and two scalars.
    assert made.sizes.batch == 512 * (3 * 4 + 1) + 8


def test_full_dpo_step_counts_the_weights_twice_for_the_reference(program: Program, tmp_path: Path) -> None:
    sizes = []
    for sets in (["train.objective=orpo"], ["train.objective=dpo"]):
        sets += ["lora=null", "data.format=preference", "data.packing=false", "data.loss_on=completion"]
        made_of = lowered(tmp_path / "recipe.yaml", *sets)
        made, _ = abstract(made_of, range(2), Backend.TORCHAX, lowering=True)
        sizes.append(made.sizes.weights)
    assert sizes[1] == pytest.approx(2 * sizes[0], rel=1e-3)


def test_a_shortened_model_has_fewer_layers_and_adapters(program: Program) -> None:
    made, text = abstract(program, range(2), Backend.TORCHAX, lowering=True)
    (trained, _), base, _ = made.arguments
    assert {name.split(".")[1] for name in trained} == {"0", "1"}
    assert {name.split(".")[2] for name in base if ".layers." in name} == {"0", "1"}
    assert made.sizes.layers == 2 and "stablehlo" in text


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("google/gemma-2-9b", (0, 1)),
        ("google/gemma-3-27b-it", (0, 1, 2, 3, 4, 5)),
        ("google/gemma-4-31B", (4, 5)),
        # Two of the last 20 of its 35 layers, which share keys and values.
        ("google/gemma-4-E2B", (8, 9, 13, 14, 33, 34)),
        ("google/gemma-4-26B-A4B", (4, 5)),
        ("meta-llama/Llama-3.2-1B", (0,)),
        ("meta-llama/Llama-3.1-8B", (0,)),
        ("Qwen/Qwen2.5-7B", (0,)),
        ("Qwen/Qwen3-8B", (0,)),
    ],
)
def test_transformers_model_of_fewer_layers_has_the_checkpoints_tensors(
    name: str, layers: tuple[int, ...]
) -> None:
    import torch
    import transformers

    model = catalog.find(name, Path())
    architecture = shortened(model.architecture, layers)
    config = transformers.AutoConfig.for_model(**deepcopy(with_layers(model.config, layers)))
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    found = {key: tuple(value.shape) for key, value in module.named_parameters()}
    found |= {key: tuple(b.shape) for key, b in module.named_buffers() if key.endswith("layer_scalar")}
    parameters = model.family.parameters(architecture)
    wanted = {source.full_name("model."): source.shape for p in parameters for source in p.sources}
    assert found == wanted
