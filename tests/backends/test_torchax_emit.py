"""Tests of train_torchax.py as text, and of where TorchAX places arrays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from recipec.compiler.catalog import find
from recipec.compiler.checks.backends import check_torchax as check
from recipec.compiler.emitters.torchax import emit_torchax
from recipec.compiler.emitters.train import emit_train
from recipec.runtime.backends.torchax.placement import adapter_specs, tensor_specs
from recipec.runtime.model.families.family import Spec
from recipec.runtime.model.partition_rules import Rule
from tests.emit.emitting import program_of, tool


def test_torchax_refuses_trained_embedding_rows(tmp_path: Path) -> None:
    (found,) = check(program_of(tmp_path, ["lora.trainable_tokens=[5]"]))
    assert (found.code, found.path) == ("E0943", "lora.trainable_tokens") and found.help


def test_supported_recipe_has_no_torchax_findings(tmp_path: Path) -> None:
    assert list(check(program_of(tmp_path))) == []


def test_torchax_script_differs_from_train_py_only_in_backend_lines(tmp_path: Path) -> None:
    """Check equal values, schedule and optimizer: only the backend differs."""
    program = program_of(tmp_path, ["train.schedule.warmup_ratio=0.03"])
    files = emit_torchax(program)
    ours, theirs = (set(text.splitlines()) for text in (files["train_torchax.py"], emit_train(program)))
    assert ours - theirs == {
        '"""LoRA fine-tuning of google/gemma-4-31B-it on v5p-8, by transformers\' model under torchax.',
        "    from runtime.backends.backend_arguments import parse_arguments",
        "    from runtime.backends.torchax.torchax_run import run",
        '    arguments = parse_arguments("train_torchax.py", ARTIFACT)',
        '    sys.exit(f"{error}: pip install -r requirements-torchax.txt")',
    }


@pytest.mark.parametrize("sets", [(), ("train.optimizer.name=sgd", "lora=null")])
def test_torchax_script_passes_ruff(sets: tuple[str, ...], tmp_path: Path, root: Path) -> None:
    files = emit_torchax(program_of(tmp_path, sets))
    script = tmp_path / "train_torchax.py"
    script.write_text(files["train_torchax.py"], encoding="utf-8")
    config = ("--config", root / "pyproject.toml")
    assert tool("ruff", "format", "--check", *config, script) == ""
    assert tool("ruff", "check", *config, script, cwd=tmp_path) == ""  # in a checkout, runtime is its own


def test_the_requirements_are_pinned_exactly(tmp_path: Path) -> None:
    """Pin a development version of torchax, because no stable version supports this torch."""
    lines = emit_torchax(program_of(tmp_path))["requirements-torchax.txt"].splitlines()
    for line in ("torchax==0.0.14.dev20261026", "torch==2.13.0", "peft==0.21.2", "jax[tpu]==0.10.2"):
        assert line in lines
    assert all("==" in line for line in lines if line and not line.startswith(("#", "-")))


def specs(model: str, tp: int = 2, rules: Sequence[Rule] = ()) -> dict[str, Spec]:
    known = find(model, Path())
    return tensor_specs(known.family, known.architecture, rules, {"fsdp": 2, "tp": tp})


@pytest.mark.parametrize("model", ["google/gemma-4-31B-it", "google/gemma-3-4b-it", "Qwen/Qwen3-8B"])
def test_weight_matrices_are_sharded_over_tp_and_fsdp(model: str) -> None:
    """Shard torch's weights [out, in]: heads and features over tp, the model's width over fsdp."""
    found = specs(model)
    layer = "layers.0.self_attn"
    assert found["embed_tokens.weight"] == ("tp", "fsdp")
    for name in ("q", "k", "v"):
        assert found[f"{layer}.{name}_proj.weight"] == ("tp", "fsdp")
    assert found[f"{layer}.o_proj.weight"] == ("fsdp", "tp")
    assert found["layers.0.mlp.up_proj.weight"] == ("tp", "fsdp")
    assert found["layers.0.mlp.down_proj.weight"] == ("fsdp", "tp")
    assert found[f"{layer}.q_norm.weight"] == (None,)


def test_untied_output_head_is_sharded_like_the_embedding() -> None:
    assert specs("Qwen/Qwen3-8B")["lm_head.weight"] == ("tp", "fsdp")


def test_key_heads_not_divisible_by_tp_are_replicated() -> None:
    """Replicate 8 key/value heads of 128 over 16 devices: 1,024 rows divide by 16, but heads do not."""
    assert specs("Qwen/Qwen3-8B", tp=16)["layers.0.self_attn.k_proj.weight"] == (None, "fsdp")


def test_sharding_rules_use_array_names() -> None:
    """Apply rules to the array's [width, heads, head size]; the tensor's rows include the head size."""
    name = "layers.0.self_attn.q_proj.weight"
    for spec, expected in ((("tp", None, None), (None, "tp")), (("fsdp", None, "tp"), ("tp", "fsdp"))):
        rules = [(r"layers\.0\.attn\.q_proj\.w", spec)]
        assert specs("google/gemma-4-31B-it", rules=rules)[name] == expected
        assert specs("google/gemma-4-31B-it", rules=rules)[name.replace("0", "1")] == ("tp", "fsdp")


def test_adapters_are_sharded_like_their_weight() -> None:
    assert adapter_specs(("tp", "fsdp")) == ((None, "fsdp"), ("tp", None))
    assert adapter_specs(("fsdp", "tp")) == ((None, "tp"), ("fsdp", None))
