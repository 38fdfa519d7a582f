"""Tests of what a worker does before it compiles, and of its error messages.

Tunix omits the activation constraints if the default backend is a CPU, and every machine that plans has a CPU
backend. The reference is Tunix's own helper with a faked TPU backend.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from recipec.compiler.emitters.train import emit_train
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.runtime_settings import run_settings
from recipec.compiler.plan import abstract as steps
from recipec.compiler.plan import worker
from recipec.compiler.plan.depth import shortened
from recipec.compiler.plan.results import Failed, Job
from recipec.runtime.model import decoder, layers
from tests.plan.plans import abstract, lowered
from tests.waiting import gone, running

RECIPE = """\
recipe: 1
name: example
model: {id: google/gemma-3-270m-it}
mesh: {accelerator: v5p-16, axes: {fsdp: 4, tp: 2}}
lora: {rank: 4}
data: {train: [gs://bucket/train.jsonl], max_length: 96, chat_template: "{{ messages }}"}
train: {steps: 10, global_batch_size: 8, optimizer: {learning_rate: 3.0e-4}}
sharding: {on_indivisible: replicate}
"""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return Job(path, (), (0, 1))


def test_unknown_topology_gives_a_one_sentence_failure(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(accelerator: object) -> None:
        raise RuntimeError("NOT_FOUND: no such layout\nmore of it")

    monkeypatch.setattr(steps, "devices", unknown)
    assert worker.compile_step(job) == Failed(
        "libtpu does not know the topology v5p:2x2x2: NOT_FOUND: no such layout",
        help="choose another mesh.accelerator or mesh.topology",
    )


def test_worker_exits_when_its_parent_is_killed() -> None:
    """Let the worker wait for its job on a pipe that nobody writes to."""
    script = f"exec 3<&0; {sys.executable} -m recipec.compiler.plan.worker $$ <&3 & echo $!; wait"
    with subprocess.Popen(
        ["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        worker_pid = int(parent.stdout.readline())
        assert running(worker_pid)
        parent.kill()
        assert gone(worker_pid)


def test_recipe_with_failing_checks_gives_a_one_sentence_failure(job: Job) -> None:
    found = worker.compile_step(Job(job.recipe, ("mesh.axes={fsdp: 3}",), job.layers))
    assert found == Failed("the recipe does not pass its checks", help="recipe check shows the errors")


@pytest.mark.parametrize(
    "sets",
    [
        (),
        ("train.optimizer={name: adafactor, weight_decay: 0.1}", "train.schedule={warmup_ratio: 0.5}"),
        ("train.optimizer={name: rmsprop, momentum: 0.5, weight_decay: 0.1}",),
        ("train.optimizer={name: sgd, momentum: 0.5, max_grad_norm: 1.0}", "lora=null"),
        ("train.optimizer={name: muon, weight_decay: 0.1}", "lora=null"),
    ],
)
def test_planned_optimizer_updates_equal_the_generated_scripts_updates(
    job: Job, sets: tuple[str, ...]
) -> None:
    import jax.numpy as jnp

    from recipec.compiler.plan.abstract import SCHEDULED_STEPS, scheduled_optimizer

    program = lowered(job.recipe, *sets)
    script: dict[str, Any] = {"__name__": "train", "__file__": str(job.recipe.parent / "train.py")}
    text = re.sub(r"CHAT_TEMPLATE\.read_text\(.*?\)", "None", emit_train(program))
    exec(compile(text, "train.py", "exec"), script)
    theirs = script["optimizer"](script["learning_rate"](SCHEDULED_STEPS))
    ours = scheduled_optimizer(program)
    weights = {"a": jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)}
    path = next(one.path for one in program.parameters if one.path.endswith("o_proj.w"))
    weights[path] = jnp.linspace(-1.0, 1.0, 24).reshape(2, 3, 4)
    found = []
    for rule in (ours, theirs):
        state, now = rule.init(weights), weights
        for _ in range(3):
            change, state = rule.update({key: 0.1 + x**2 for key, x in now.items()}, state, now)
            now = {key: x + change[key] for key, x in now.items()}
        found.append(now)
    for key, start in weights.items():
        assert jnp.array_equal(*(one[key] for one in found)) and not jnp.array_equal(found[0][key], start)


def test_abstract_step_sizes_are_the_bytes_of_one_device(job: Job) -> None:
    """Compare with the sum over the program's own parameters and adapters."""
    program = lowered(job.recipe)
    made, _ = abstract(program, range(program.architecture.num_layers))
    axes = {"fsdp": 4, "tp": 2}

    def share(shape: tuple[int, ...], spec: tuple[str | None, ...], size: int) -> float:
        return math.prod(shape) * size / math.prod(axes[axis] for axis in spec if axis is not None)

    weights = sum(share(p.shape, p.spec, 2) for p in program.parameters)
    adapters = sum(share(x.a_shape, x.a_spec, 4) + share(x.b_shape, x.b_spec, 4) for x in program.adapters)
    assert made.sizes.weights == pytest.approx(weights, rel=1e-9)
    assert made.sizes.adapters == pytest.approx(adapters, rel=1e-9)
    # Adam's two moments, and gradients accumulated over two micro-batches.
    assert program.accumulation_steps == 2
    assert made.sizes.optimizer == pytest.approx(3 * adapters, rel=1e-3)
    # Tokens, positions and segments of one row in int32, its mask, and two scalars.
    assert made.sizes.batch == 96 * (3 * 4 + 1) + 8


def test_abstract_generation_is_the_rollouts_program_in_its_layout() -> None:
    """Lower two layers at their real sizes for virtual devices: 256 rows of 256 + 1,024 tokens, on tp 8 while
    the step is on fsdp 8."""
    import jax

    from recipec.compiler.plan.abstract import abstract_generation
    from recipec.runtime.model.sharding import arrange

    program, layers = lowered("qwen3-8b-grpo-v6e8", "model.attention=dot"), (0, 1)
    settings = run_settings(program)
    mesh = arrange(settings.mesh.axes, jax.devices("cpu")[: settings.mesh.devices])
    run, arguments, inside, sizes = abstract_generation(program, layers, settings, mesh)
    assert (dict(mesh.shape), dict(inside.shape)) == ({"fsdp": 8, "tp": 1}, {"fsdp": 1, "tp": 8})
    with inside:
        made = run.lower(*arguments)
    assert "stablehlo.while" in made.as_text()
    shapes = [leaf.shape for leaf in jax.tree.leaves(made.out_info)]
    assert shapes == [(256, 1024), (256,), (256, 1024), (256,)]
    weights = sum(
        math.prod(p.shape) * 2 / (8 if "tp" in p.spec else 1)
        for p in program.family.parameters(shortened(program.architecture, layers))
    )
    assert sizes.weights == pytest.approx(weights, rel=1e-9)
    of_layers = [x for x in program.adapters if x.a_path.startswith(("layers.0.", "layers.1."))]
    adapters = sum(
        math.prod(shape) * 4 / (8 if "tp" in spec else 1)
        for x in of_layers
        for shape, spec in ((x.a_shape, x.a_spec), (x.b_shape, x.b_spec))
    )
    assert sizes.adapters == pytest.approx(adapters, rel=1e-9) and sizes.optimizer == 0
    # Tokens and segments in int32, and a salt of each row, whole on each device.
    assert sizes.batch == 256 * (256 * 2 * 4 + 4)


DPO = ("train.objective=dpo", "data.format=preference", "data.packing=false", "data.loss_on=completion")


@pytest.mark.parametrize(
    ("recipe", "sets"),
    [
        ("qwen3-8b-dpo-v5e8", ()),
        ("qwen3-8b-dpo-v5e8", ("train.objective=orpo", "model.quantization=int8")),
        ("llama31-8b-v6e8", ("lora=null", "merge.adapter=false", "serve=null")),
        ("llama31-8b-v6e8", ("lora=null", "merge.adapter=false", "serve=null", *DPO)),
    ],
)
def test_quantized_full_and_preference_steps_lower_with_expected_bytes(
    recipe: str, sets: tuple[str, ...]
) -> None:
    """Lower two layers at their real sizes for virtual devices, without computing anything."""
    program = lowered(recipe, *sets, "model.attention=dot")
    made, text = abstract(program, (0, 1), lowering=True)
    assert "stablehlo" in text
    a, lora = program.architecture, program.lora
    whole = 2 * sum(math.prod(p.shape) for p in program.family.parameters(shortened(a, (0, 1)))) / 8
    if lora is None:
        copies = 2 if program.recipe.train.objective == "dpo" else 1  # the reference
        assert made.sizes.adapters == 0 and made.sizes.weights == pytest.approx(copies * whole, rel=0.01)
        return
    # The embedding and the head are not quantized; most of the two layers is.
    outside = 2 * 2 * a.vocab_size * a.hidden_size / 8
    bytes_a_number = {"nf4": 4.5 / 8, "int8": 1.0}[program.recipe.model.quantization or ""]
    expected = outside + (whole - outside) / 2 * bytes_a_number
    assert made.sizes.weights == pytest.approx(expected, rel=0.01)


SETS = (
    "mesh.axes={fsdp: 2, tp: 2}",
    "model.attention=dot",
    "train.global_batch_size=2",
    "data.max_length=64",
)
LAYERS = (4, 5)
"""A sliding and a global layer of Gemma 4 31B, at their real sizes: nothing is computed."""


@pytest.fixture(scope="module")
def program() -> Program:
    return lowered("gemma4-31b-v5p8", *SETS)


def constraints(program: Program) -> Counter[str]:
    """Count the shardings that the step's HLO constrains arrays to, before partitioning."""
    _, text = abstract(program, LAYERS, lowering=True)
    found = re.findall(r"sdy\.sharding_constraint %\S+ (<.*?>) : (tensor<\S+>)", text)
    assert found or "sharding_constraint" not in text
    return Counter(f"{array} {spec}" for spec, array in found)


@pytest.fixture(scope="module")
def ours(program: Program) -> Counter[str]:
    return constraints(program)


def test_planned_step_has_the_same_constraints_as_tunix_on_a_tpu(
    program: Program, ours: Counter[str]
) -> None:
    with tunix_on_a_tpu():
        theirs = constraints(program)
    assert ours == theirs
    # Queries, keys, values, the feed-forward block and both results, in each layer.
    assert sum(ours.values()) >= len(LAYERS) * 7
    assert any('"tp"' in key for key in ours) and any('"fsdp"' in key for key in ours)


def test_constraint_count_falls_if_the_constrain_helper_does_nothing(
    program: Program, ours: Counter[str]
) -> None:
    with constraining(lambda x, spec: x):
        dropped = constraints(program)
    assert sum(dropped.values()) < sum(ours.values()) / 2


def tunix_on_a_tpu() -> Any:
    """Replace our helper by Tunix's, which is made to see a TPU backend."""
    import jax
    from tunix.utils import sharding_utils

    class Tpu:
        platform = "tpu"

    shard = sharding_utils.shard
    fake = mock.Mock(wraps=jax)
    fake.devices = lambda: [Tpu()]

    def on_a_tpu(x: Any, spec: Any) -> Any:
        with mock.patch.object(sharding_utils, "jax", fake):
            return shard(x, spec, False)

    return constraining(on_a_tpu)


def constraining(constrain: Any) -> Any:
    """Replace the helper in the modules of a decoder."""
    stack = ExitStack()
    for module in (decoder, layers):
        stack.enter_context(mock.patch.object(module, "constrain", constrain))
    return stack
