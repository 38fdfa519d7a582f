"""Tests of `recipe plan --backend torchax` with a fake compiler: its jobs, and the printed plan."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from recipec.compiler.checks.backends import E0922
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.backend import Backend
from recipec.compiler.lowering.program import Program
from recipec.compiler.packages import install
from recipec.compiler.plan import fit, identity, pool
from recipec.compiler.plan.planner import placements
from recipec.compiler.plan.results import Job
from recipec.spec.diagnostics import Diagnostic
from tests.plan.plans import estimate, lowered
from tests.plan.test_commands import planned, run

RECIPE = """\
recipe: 1
name: example
model: {id: google/gemma-3-1b-it}
mesh: {accelerator: v5p-8, axes: {fsdp: 2, tp: 2}}
lora: {rank: 16}
data: {train: [gs://bucket/train.jsonl]}
train: {steps: 100, global_batch_size: 4}
sharding: {on_indivisible: replicate}
"""
TORCHAX = ("--backend", "torchax")


pytestmark = pytest.mark.usefixtures("told")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


def asked(log: Path) -> set[str]:
    """Return the backends of the started workers."""
    return {start.read_text(encoding="utf-8") for start in log.iterdir()}


def test_each_backends_step_is_compiled_and_cached_separately(file: Path, fake: Path) -> None:
    first = planned(file)["plan"]
    assert first["backend"] == "tunix" and asked(fake) == {"tunix"}
    second = planned(file, *TORCHAX)["plan"]
    assert second["backend"] == "torchax" and second["cached"] is False
    assert asked(fake) == {"tunix", "torchax"}
    assert planned(file, *TORCHAX)["plan"]["cached"] is True
    assert any("no measurement of one by it is published" in note for note in second["notes"])
    assert first["notes"] == [note for note in second["notes"] if "TorchAX" not in note]
    # The same figures give the same results.
    assert second["estimate"]["memory"] == first["estimate"]["memory"]
    assert set(second["versions"]) - set(first["versions"]) == {"torch", "torchax", "transformers", "peft"}


def test_cache_key_depends_on_the_backend(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "versions", lambda backend: {})
    jobs = [Job(file, (), (0, 1), backend=backend) for backend in (Backend.TUNIX, Backend.TORCHAX)]
    assert len({identity.name(lowered(file), job) for job in jobs}) == 2


def test_text_and_page_name_train_torchax_only_for_its_backend(file: Path, tmp_path: Path) -> None:
    pages = [tmp_path / "tunix.html", tmp_path / "torchax.html"]
    texts = [run("plan", file, "--html", pages[0]), run("plan", file, *TORCHAX, "--html", pages[1])]
    assert all(done.exit_code == 0 for done in texts)
    for shown in ([done.stdout for done in texts], [page.read_text(encoding="utf-8") for page in pages]):
        assert ["train_torchax.py" in text for text in shown] == [False, True]


def test_exact_plan_cost_and_budget_compile_the_torchax_step(file: Path, fake: Path) -> None:
    exact = planned(file, *TORCHAX, "--exact")["plan"]
    assert exact["estimate"]["compiled_layers"] == [26]
    done = run("cost", file, *TORCHAX)
    assert done.exit_code == 0 and "estimate of `recipe plan`" in done.stdout
    done = run("plan", file, *TORCHAX, "--set", "budget={max_hours: 0.1}")
    assert done.exit_code == 1 and "error[E1003]" in done.stderr
    assert asked(fake) == {"torchax"}


def test_fit_does_not_try_changes_that_the_backend_refuses(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(program: Program, backends: Sequence[Backend]) -> list[Diagnostic]:
        quantized = program.recipe.model.quantization is not None
        return [Diagnostic(E0922, "no", "lora")] if quantized and Backend.TORCHAX in backends else []

    monkeypatch.setattr(fit, "diagnosed", refuse)
    large = lowered(file)
    tried: dict[Backend, set[str]] = {}
    for backend in (Backend.TUNIX, Backend.TORCHAX):
        found = fit.find(large, lambda sets: estimate(100), most=50, backend=backend)
        tried[backend] = {argument for way, _ in found.tried for argument in way.sets}
    assert tried[Backend.TUNIX] - tried[Backend.TORCHAX] == {"model.quantization=nf4"}


def test_recipe_that_torchax_cannot_train_fails_before_compiling(file: Path, fake: Path) -> None:
    for command in ("plan", "cost"):
        done = run(command, file, *TORCHAX, "--set", "lora.kv=shared")
        assert done.exit_code == 1 and "error[E0922]" in done.stderr and "--> --set" in done.stderr
    assert not list(fake.iterdir())


def test_torchax_plan_reports_N0936_for_adafactor(file: Path) -> None:
    adafactor = ("--set", "train.optimizer={name: adafactor}")
    found = planned(file, *TORCHAX, *adafactor)["diagnostics"]
    assert [item["code"] for item in found] == ["N0936"]
    assert planned(file, *adafactor)["diagnostics"] == []


def test_plan_refuses_the_trl_backend(file: Path, fake: Path) -> None:
    with pytest.raises(ArtifactError) as caught:
        run("plan", file, "--backend", "trl")
    assert "runs in torch on GPUs" in str(caught.value) and "--backend torchax" in (caught.value.help or "")
    assert not list(fake.iterdir())


def test_missing_torchax_error_names_the_install_command(
    file: Path, fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(pool, "find_spec", lambda name: None if name == "torchax" else find(name))
    with pytest.raises(ArtifactError, match="needs torchax, which cannot be imported") as caught:
        run("plan", file, *TORCHAX)
    assert caught.value.help == install("train", "plan", "torchax")
    assert not list(fake.iterdir()) and run("plan", file).exit_code == 0


def test_torchax_placements_match_the_tensors_of_transformers(file: Path) -> None:
    one = lowered(file)
    found = {placement.pattern: placement for placement in placements(one, Backend.TORCHAX)}
    query = found["layers.{}.self_attn.q_proj.weight"]
    # 4 heads of 256 by 1152 features in bfloat16, over 4 devices, in each of 26 layers.
    assert (query.shape, query.spec, query.count) == ((1024, 1152), ("tp", "fsdp"), 26)
    assert query.bytes == 26 * 1024 * 1152 * 2 / 4
    # A single key/value head is not split over tp.
    assert found["layers.{}.self_attn.k_proj.weight"].spec == (None, "fsdp")
    assert found["layers.{}.self_attn.o_proj.weight"].spec == ("fsdp", "tp")
    assert found["layers.{}.mlp.down_proj.lora_A"].spec == (None, "tp")
    numbers = sum(math.prod(p.shape) * p.count for p in found.values())
    assert numbers == one.base_parameters + one.trainable_parameters
