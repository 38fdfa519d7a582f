"""Made-up training runs: random adapters in Orbax, with a run's record next to them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from recipec.runtime.checkpoints.trained_weights import TrainedAdapters
from recipec.runtime.merging import journal, writer
from recipec.runtime.merging.arithmetic import Change
from recipec.runtime.merging.file_plan import AS_BASE, MergePlan, plan_merge
from recipec.runtime.merging.output_folder import OutputFolder
from recipec.runtime.model.adapters import Adapter, build_adapters, lora_settings
from recipec.runtime.model.selection import trained_whole
from recipec.runtime.peft.exporting import adapter_config, config_bytes, write_weights
from recipec.runtime.peft.peft_names import ADAPTER_CONFIG, WEIGHTS
from recipec.runtime.settings import ModelSettings
from recipec.runtime.weights.checkpoint import HFCheckpoint

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def lora_section(**overrides: Any) -> dict[str, Any]:
    """Return the `lora` section of a resolved recipe."""
    return {
        "rank": 3,
        "alpha": 6.0,
        "dropout": 0.05,
        "targets": list(ALL),
        "layers": "all",
        "init": "peft",
        "dtype": "float32",
        "kv": "independent",
        **overrides,
    }


def random_arrays(adapters: list[Adapter], seed: int = 0, scale: float = 1.0) -> dict[str, np.ndarray]:
    """Return random A and B of each adapter by path."""
    random = np.random.default_rng(seed)
    out = {}
    for adapter in adapters:
        fan_in = int(np.prod(adapter.a_shape[:-1]))
        out[adapter.a_path] = (random.standard_normal(adapter.a_shape) * fan_in**-0.5).astype(np.float32)
        b = (random.standard_normal(adapter.b_shape) * scale).astype(np.float32)
        out[adapter.b_path] = b
        for path, shape, _ in adapter.arrays[2:]:
            out[path] = random.uniform(0.5, 1.5, shape).astype(np.float32)
    return out


def save_run(
    directory: Path,
    base: HFCheckpoint,
    section: Mapping[str, Any],
    steps: tuple[int, ...] = (4,),
    scale: float = 0.2,
    mesh: Mapping[str, int] | None = None,
    model: Mapping[str, Any] | None = None,
) -> list[Adapter]:
    """Write ROOT/STEP/model_params and recipe.lock.json as a training run does."""
    import jax.numpy as jnp
    from flax import nnx
    from orbax import checkpoint as ocp

    adapters = build_adapters(
        base.family, base.architecture, lora_settings(section, base.architecture.num_layers)
    )
    manager = ocp.CheckpointManager(
        directory,
        item_handlers={"model_params": ocp.PyTreeCheckpointHandler()},
        options=ocp.CheckpointManagerOptions(create=True),
    )
    whole = trained_whole(
        base.family.parameters(base.architecture), lora_settings(section, base.architecture.num_layers)
    )
    for step in steps:
        tree: dict[Any, Any] = {}
        random = np.random.default_rng(step)
        arrays = {p.path: random.standard_normal(p.shape).astype(np.float32) for p in whole}
        for path, array in {**random_arrays(adapters, seed=step, scale=scale), **arrays}.items():
            *folders, leaf = (int(part) if part.isdigit() else part for part in path.split("."))
            node = tree
            for folder in folders:
                node = node.setdefault(folder, {})
            node[leaf] = nnx.LoRAParam(jnp.asarray(array, section["dtype"]))
        manager.save(step, args=ocp.args.Composite(model_params=ocp.args.PyTreeSave(item=nnx.State(tree))))
    manager.wait_until_finished()
    manager.close()
    write_lock(directory, base, section, mesh, model=model)
    settings = lora_settings(section, base.architecture.num_layers)
    if settings.principal:
        from recipec.runtime.checkpoints.first_adapters import write_initial
        from recipec.runtime.training.first_values import computed

        write_initial(directory, computed(base, settings, 0))
    return adapters


def write_merged(
    base: HFCheckpoint,
    changes: Mapping[str, Change],
    folder: Path,
    dtype: str | None = None,
    max_shard_size: str = AS_BASE,
) -> MergePlan:
    """Write the base with changes, without a run's record: the weights, their index and config.json."""
    plan = plan_merge(base, changes, dtype, max_shard_size)
    with OutputFolder(folder).locked():
        kept = journal.begin(OutputFolder(folder), {}, {shard.file for shard in plan.shards})
        writer.write_shards(plan, base, kept)
        kept.folder.write("config.json", base.config_file())
        if plan.index is not None:
            kept.folder.write("model.safetensors.index.json", plan.index)
        kept.end()
    return plan


def write_adapter(folder: Path, base: HFCheckpoint, model: ModelSettings, trained: TrainedAdapters) -> None:
    """Write a PEFT adapter, as a merge does: its weights and adapter_config.json."""
    deltas = trained.deltas()
    with (folder / WEIGHTS).open("xb") as file:
        write_weights(file, base, trained.settings, deltas, trained.saved(base))
    config = adapter_config(base, model, trained.settings, deltas)
    (folder / ADAPTER_CONFIG).write_bytes(config_bytes(config))


def write_lock(
    directory: Path,
    base: HFCheckpoint,
    section: Mapping[str, Any] | None,
    mesh: Mapping[str, int] | None = None,
    only: Sequence[str] = (),
    model: Mapping[str, Any] | None = None,
) -> None:
    """Write a recipe.lock.json with the parts that merging reads."""
    axes = dict(mesh or {"fsdp": 1, "tp": 1})
    lock = {
        "lock": 1,
        "compiler": "recipec 0.1.0",
        "name": "tiny",
        "recipe": {
            "recipe": 1,
            "name": "tiny",
            "model": {"id": "tiny", **(model or {})},
            "lora": section,
            "train": {"trainable_modules": list(only)},
            "mesh": {"accelerator": f"cpu-{np.prod(list(axes.values()))}", "axes": axes},
            "sharding": {"rules": [], "on_indivisible": "error"},
        },
        "model": {"family": base.family.name, "architecture": asdict(base.architecture)},
        "packages": {},
        "runtime": "",
        "files": {},
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "recipe.lock.json").write_text(json.dumps(lock, indent=2, sort_keys=True) + "\n")
