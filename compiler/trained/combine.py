"""Combine PEFT adapters of one base into one, as peft 0.21's `add_weighted_adapter` does, without the base.

In each module, PEFT's own functions combine the A matrices, and likewise the B matrices. The weights are
sqrt(|w * scale|), where scale is alpha / rank, or alpha / sqrt(rank) with rsLoRA; those of A have the sign of
w. The result's scale is 1. DARE's masks are drawn module by module, in the order of their names.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from re import escape
from typing import Any

from recipec.compiler.errors import ArtifactError
from recipec.compiler.packages import PACKAGES, require_packages
from recipec.compiler.pages import markdown
from recipec.compiler.pages.document import Table
from recipec.compiler.trained.model_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_json
from recipec.runtime.data.stops import GENERATION, end_tokens, parsed, with_stops
from recipec.runtime.peft.adapter import open_adapter

ALIKE = ("base_model_name_or_path", "revision", "layers_to_transform", "layers_pattern", "exclude_modules")
"""Keys of adapter_config.json that must be equal in all adapters, because the result has one of each."""


@dataclass(frozen=True)
class Combination:
    """The adapters to combine, and the method.

    Attributes:
        folders: of the adapters.
        weights: one for each adapter.
        method: "linear", "ties", "dare_linear" or "dare_ties", PEFT's names.
        density: the share of each adapter's numbers that is kept, None for linear.
        seed: of DARE's masks.
    """

    folders: Sequence[Path]
    weights: Sequence[float]
    method: str
    density: float | None = None
    seed: int = 0


def combine(asked: Combination, output: Path) -> None:
    """Write the combined PEFT adapter.

    Raises:
        ArtifactError: when packages are missing, the adapters are incompatible, or the folder exists.
        UserError: when one is not an adapter, or has more than A and B on linear layers.
    """
    require_packages("combining adapters", ("torch", "peft", *PACKAGES), ("train", "torchax"))
    import torch
    from safetensors.torch import save_file

    from recipec.runtime.merging.tokenizer_files import own_files

    if output.exists():
        raise ArtifactError(f"{output} already exists", "name another folder with -o")
    adapters = [open_adapter(folder) for folder in asked.folders]
    configs = [read_json(folder / ADAPTER_CONFIG) for folder in asked.folders]
    _demand_alike(asked.folders, configs)
    torch.manual_seed(asked.seed)
    combined: dict[str, list[torch.Tensor]] = {}
    names: dict[str, str] = {}
    for module in sorted({module for adapter in adapters for module in adapter.tensors}):
        having = [(a, w) for a, w in zip(adapters, asked.weights, strict=True) if module in a.tensors]
        names[module] = having[0][0].full_names[module]
        pairs = [[torch.tensor(a.read(name)).float() for name in a.tensors[module]] for a, _ in having]
        if len({pair[0].shape for pair in pairs}) > 1:
            ranks = ", ".join(str(len(pair[0])) for pair in pairs)
            raise ArtifactError(
                f"{names[module]} has A and B of rank {ranks}, which cannot be added",
                "combine adapters of one rank",
            )
        keys = module.removesuffix("v_proj") + "k_proj"
        if module.endswith("v_proj") and _copied(adapters, keys, module):
            combined[module] = combined[keys]  # DARE would draw a second, different mask
            continue
        scales = [weight * _scale(a.config, names[module]) for a, weight in having]
        combined[module] = [
            _combined(asked, [pair[which] for pair in pairs], scales, signed=which == 0) for which in (0, 1)
        ]
    tensors = {
        f"base_model.model.{names[module]}.lora_{which}.weight": tensor.contiguous().clone()
        for module, pair in combined.items()
        for which, tensor in zip("AB", pair, strict=True)
    }
    config = _config(configs, {names[module]: len(pair[0]) for module, pair in combined.items()})
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        save_file(tensors, partial / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (partial / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (partial / "README.md").write_text(_card(asked, output.name, config), encoding="utf-8")
        if (stops := _stops(asked.folders)) is not None:
            (partial / GENERATION).write_bytes(stops)
        for name, data in own_files(str(asked.folders[0].resolve()), None, Path()).items():
            (partial / name).write_bytes(data)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _stops(folders: Sequence[Path]) -> bytes | None:
    """Return the first adapter's generation_config.json with the end tokens of all adapters; None if no
    adapter has one."""
    configs = [(folder / GENERATION).read_bytes() for folder in folders if (folder / GENERATION).is_file()]
    ends = [token for content in configs for token in end_tokens(parsed(content) or {})]
    return with_stops(configs[0], {}, ends) if configs else None


def _demand_alike(folders: Sequence[Path], configs: Sequence[Mapping[str, Any]]) -> None:
    first = configs[0]
    for folder, config in zip(folders, configs, strict=True):
        for key in ALIKE:
            if config.get(key) != first.get(key):
                raise ArtifactError(
                    f"{folders[0]} has {key} {json.dumps(first.get(key))}, and {folder} "
                    f"{json.dumps(config.get(key))}",
                    f"combine adapters of one base; if both mean the same, edit {ADAPTER_CONFIG}",
                )
        for key, what in (
            ("modules_to_save", "whole modules"),
            ("trainable_token_indices", "rows of the embedding"),
        ):
            if config.get(key):
                raise ArtifactError(
                    f"{folder} has {what} besides its adapters, which are not combined",
                    f"combine adapters without {key}",
                )
        if config.get("target_parameters"):
            raise ArtifactError(
                f"{folder} has adapters on parameters (experts), which PEFT does not combine",
                "combine adapters on linear layers, without target_parameters",
            )
        if isinstance(config.get("target_modules"), str) != isinstance(first.get("target_modules"), str):
            raise ArtifactError(
                f"target_modules is a list in {folders[0]} or {folder}, and an expression in the other",
                f"write both in one form in {ADAPTER_CONFIG}",
            )


def _copied(adapters: Iterable[Any], keys: str, values: str) -> bool:
    """Return whether in all adapters v_proj has the A and B of k_proj, as merge.py writes them for vLLM."""

    def both(adapter: Any, module: str) -> list[Any]:
        return [adapter.read(tensor).tolist() for tensor in adapter.tensors.get(module, ())]

    return all(both(adapter, keys) == both(adapter, values) for adapter in adapters)


def _scale(config: Any, module: str) -> float:
    rank, alpha = config.rank_of(module), config.alpha_of(module)
    return float(alpha / (math.sqrt(rank) if config.rslora else rank))


def _combined(asked: Combination, tensors: list[Any], scales: Sequence[float], signed: bool) -> Any:
    """Combine the A matrices, or the B matrices, of one module, in float32.

    Args:
        scales: weight times scale of each adapter.
        signed: whether these matrices carry the sign of a negative weight.
    """
    import torch
    from peft.utils import merge_utils

    weights = torch.tensor(
        [math.sqrt(abs(scale)) * (math.copysign(1, scale) if signed else 1) for scale in scales]
    )
    if asked.method == "linear":
        return merge_utils.task_arithmetic(tensors, weights)
    return getattr(merge_utils, asked.method)(tensors, weights, asked.density)


def _config(configs: Sequence[Mapping[str, Any]], ranks: Mapping[str, int]) -> dict[str, Any]:
    """Return the result's adapter_config.json: the first adapter's, for all modules of any, at a scale of 1.

    Args:
        ranks: by the modules' full names.
    """
    rank = max(ranks.values())
    pattern = {escape(name): module_rank for name, module_rank in ranks.items() if module_rank != rank}
    targets = [config.get("target_modules") for config in configs]
    if isinstance(targets[0], str):
        united: Any = "|".join(dict.fromkeys(f"({target})" for target in targets))
    else:
        united = sorted({name for target in targets for name in target or ()})
    return {
        **configs[0],
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": pattern,
        "alpha_pattern": pattern,
        "target_modules": united,
        "use_rslora": False,
        "inference_mode": True,
    }


def _card(asked: Combination, name: str, config: Mapping[str, Any]) -> str:
    base = config.get("base_model_name_or_path")
    how = f"`{asked.method}`"
    if asked.density is not None:
        how += f", density {asked.density:g}"
    if asked.method.startswith("dare"):
        how += f", seed {asked.seed}"
    pairs = zip(asked.folders, asked.weights, strict=True)
    rows = [(folder.resolve().name, f"{weight:g}") for folder, weight in pairs]
    return "\n".join(
        [
            *("---", *([f"base_model: {base}"] if base else []), "library_name: peft", "tags: [lora]", "---"),
            *(f"# {name}", "", f"LoRA adapters combined by PEFT's {how}.", ""),
            *(*markdown.table(Table(("adapter", "weight"), rows)), ""),
        ]
    )
