"""Test what the tools' common terms mean: schedules, optimizers, quantization, batches, placement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipec.port.engine import collect
from recipec.port.keys import Keys, keys_of
from recipec.port.ledger import Ledger
from recipec.port.meaning import adapters, datasets, sharding, training
from recipec.port.source import Sources
from tests.port.dialects import codes, samples, source, spoken


@pytest.mark.parametrize(
    "name, kwargs, expected, final, exact",
    [
        ("cosine", {"num_cycles": 1.5}, "cosine", 0.0, False),
        ("cosine_with_restarts", {"num_cycles": 3}, "cosine", 0.0, False),
        ("cosine_with_min_lr", {"min_lr": 1e-5}, "cosine", 0.1, True),
        ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.2}, "cosine", 0.2, False),
        ("polynomial", {"power": 2.0, "lr_end": 0.0}, "linear", 0.0, False),
        ("inverse_sqrt", {}, "constant", 0.0, False),
        ("reduce_lr_on_plateau", {}, "constant", 0.0, False),
        ("sawtooth", {}, None, 0.0, True),
    ],
)
def test_schedule_maps_exactly_or_to_the_nearest_with_a_note(
    name: str, kwargs: dict[str, Any], expected: str | None, final: float, exact: bool
) -> None:
    found = training.schedule_of(name, kwargs, 1e-4)
    assert found.name == expected and (found.note == "") is exact
    assert found.min_lr_ratio == pytest.approx(final)
    assert found.warms_up is (name not in ("constant", "reduce_lr_on_plateau"))


@pytest.mark.parametrize(
    "name, expected, exact",
    [
        ("torch.optim.AdamW", "adamw", True),
        ("paged_adamw_8bit", "adamw", False),
        ("bitsandbytes.optim.PagedAdamW", "adamw", True),
        ("lion_8bit", "lion", False),
        ("transformer_engine.pytorch.optimizers.fused_adam.FusedAdam", "adamw", True),
        ("galore_adamw", "adamw", None),
        ("came_pytorch", "adafactor", None),
        ("lomo", "adamw", None),
    ],
)
def test_optimizer_name_maps_exactly_or_is_marked_as_different(
    name: str, expected: str, exact: bool | None
) -> None:
    found = training.optimizer_of(name)
    assert found.name == expected and (found.note == "") is bool(exact) and found.same is (exact is not None)


@pytest.mark.parametrize(
    "bits, kind, nested, expected, exact",
    [
        (16, "nf4", False, None, True),
        (4, "nf4", True, "nf4", False),
        (4, "fp4", False, "nf4", False),
        (8, "nf4", False, "int8", False),
    ],
)
def test_quantization_maps_exactly_or_to_the_nearest_with_a_note(
    bits: int | None, kind: str, nested: bool, expected: str | None, exact: bool
) -> None:
    found = adapters.quantized(bits, kind, nested)
    assert found.value == expected and (found.note == "") is exact


def test_global_batch_excludes_tensor_parallel_devices() -> None:
    assert training.global_batch(2, 4, 8).rows == 64
    assert training.global_batch(2, 4, 8, shared=4).rows == 16
    assert str(training.global_batch(1, 4, 1)) == "1 row x 4 micro-batches x 1 data-parallel device"
    with pytest.raises(ValueError):
        training.global_batch(1, 1, 6, shared=4)


def ledger_of(folder: Path, content: dict[str, Any]) -> Ledger:
    return Ledger(Sources(source(folder, "file.yaml", content)))


CLUSTER = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16"}


def test_report_covers_every_accelerate_config_key(tmp_path: Path) -> None:
    content = {
        **samples(keys_of("accelerate", "cluster")),
        **samples(keys_of("accelerate", "sagemaker")),
        **CLUSTER,
        "fsdp_config": samples(keys_of("accelerate", "fsdp")),
        "parallelism_config": samples(keys_of("accelerate", "parallelism_config")),
        "deepspeed_config": samples(keys_of("accelerate", "deepspeed")),
        "fp8_config": samples(keys_of("accelerate", "fp8")),
        "dynamo_config": samples(keys_of("accelerate", "dynamo")),
        "megatron_lm_config": samples(keys_of("accelerate", "megatron_lm")),
        "mpirun_config": samples(keys_of("accelerate", "mpirun")),
    }
    ledger = ledger_of(tmp_path, content)
    collect(sharding.accelerate(ledger, ledger.sources.main))
    assert ledger.unread(ledger.sources.main) == []


@pytest.mark.parametrize(
    "keys, processes, shared",
    [
        ({"num_processes": 4, "num_machines": 2}, 4, 1),
        ({"num_processes": 4, "distributed_type": "NO"}, 1, 1),
        ({"num_processes": -1}, None, 1),
        ({"num_processes": 8, "parallelism_config": {"parallelism_config_tp_size": 2}}, 8, 2),
        ({"num_processes": 8, "parallelism_config": {"tp_size": 2, "cp_size": 2, "dp_shard_size": 2}}, 8, 4),
    ],
)
def test_accelerate_config_gives_process_and_shared_device_counts(
    tmp_path: Path, keys: dict[str, Any], processes: int | None, shared: int
) -> None:
    ledger = ledger_of(tmp_path, {**CLUSTER, **keys})
    launch = collect(sharding.accelerate(ledger, ledger.sources.main))
    assert (launch.processes, launch.shared, launch.mixed_precision) == (processes, shared, "bf16")
    spoken(ledger)


@pytest.mark.parametrize("prefix", ["", "fsdp_"])
def test_fsdp_keys_are_read_with_and_without_prefix(tmp_path: Path, prefix: str) -> None:
    section = {f"{prefix}{key.removeprefix('fsdp_')}": "true" for key in keys_of("accelerate", "fsdp")}
    ledger = ledger_of(tmp_path, {"fsdp_config": section})
    assert collect(sharding.fsdp(Keys(ledger, ledger.sources.main, "accelerate", prefix="fsdp_config.")))
    assert ledger.value("remat.policy") == "decoder"
    spoken(ledger)


def test_report_covers_every_axolotl_fsdp_key(tmp_path: Path) -> None:
    keys = keys_of("axolotl", "FSDPConfig")
    ledger = ledger_of(tmp_path, {"fsdp_config": samples(keys)})
    collect(sharding.fsdp(Keys(ledger, ledger.sources.main, "Axolotl", prefix="fsdp_config.")))
    assert ledger.unread(ledger.sources.main) == []


def test_deepspeed_optimizer_scheduler_and_tensor_parallel_are_read(tmp_path: Path) -> None:
    content = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "gradient_clipping": 1,
        "train_batch_size": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.999]}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
        "tensor_parallel": {"autotp_size": 4},
        "fp16": {"enabled": False, "loss_scale": 0},
        "steps_per_print": 10,
    }
    ledger = ledger_of(tmp_path, content)
    keys = Keys(ledger, ledger.sources.main, "DeepSpeed")
    expected = {"gradient_clipping": 1.0, "fp16.enabled": False, "optimizer.params.betas": [0.9, 0.999]}
    found = collect(sharding.deepspeed(keys, expected))
    assert (found.optimizer, found.scheduler, found.shared) == ("AdamW", "WarmupDecayLR", 4)
    spoken(ledger)
    assert codes(ledger) == []


@pytest.mark.parametrize(
    "name, text, expected",
    [
        ("a.jsonl", '{"messages": []}\n{"text": 1}\n', {"messages": []}),
        ("a.json", '[\n {"text": "x"}, {"other": 1}]', {"text": "x"}),
        ("a.jsonl", "no json", None),
        ("a.jsonl", "[1, 2]", None),
        ("a.csv", "text\nx\n", None),
        ("a.jsonl", "", None),
    ],
)
def test_the_first_row_of_a_file_is_read_for_its_columns(
    tmp_path: Path, name: str, text: str, expected: Any
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert datasets.first_row(name, tmp_path) == expected
    assert datasets.first_row("absent.jsonl", tmp_path) is None
    (tmp_path / "folder").mkdir()
    (tmp_path / name).rename(tmp_path / "folder" / name)
    assert datasets.first_row("folder", tmp_path) == expected
