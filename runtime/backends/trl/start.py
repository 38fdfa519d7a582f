"""The start of a run by TRL: the Trainer's settings, and the model with its trainable parameters."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from trl import SFTConfig

from ...errors import UserError
from ...model.adapters import LoraSettings
from ...settings import CheckpointSettings, DataSettings, ModelSettings, TrainSettings
from ...training.first_values import residual
from ...training.objectives import keeps_copy
from ...weights.checkpoint import HFCheckpoint
from ..peft_model import (
    Pairs,
    attach,
    full_parameters,
    load_model,
    set_adapters,
    set_base,
    start,
    text_prefix,
)


@dataclass(frozen=True)
class TrlSettings:
    """What a generated train_trl.py states about its recipe, as `trl_run.run` takes it."""

    model: ModelSettings
    lora: LoraSettings | None
    data: DataSettings
    train: TrainSettings
    checkpoint: CheckpointSettings
    micro_batch_rows: int
    max_grad_norm: float | None
    master_weights: bool


def settings_of(settings: TrlSettings, directory: Path, accumulation: int, until: int, cpu: bool) -> Any:
    """Return a run's SFTConfig: the Trainer's own settings. RecipeTrainer handles data, losses and metrics.

    Args:
        directory: of the checkpoints.
        accumulation: pieces per optimizer step on each process.
        until: the optimizer step to stop after.
        cpu: whether to run on the CPU, with the backend gloo.
    """
    return SFTConfig(
        **trainer_settings(settings, directory, accumulation, until, cpu),
        dataset_kwargs={"skip_prepare_dataset": True},
        neftune_noise_alpha=settings.train.neftune_noise_alpha,
        max_length=None,
        packing=False,
    )


def trainer_settings(
    settings: TrlSettings, directory: Path, accumulation: int, until: int, cpu: bool
) -> dict[str, Any]:
    """Return the settings of transformers' Trainer, by name. The arguments are those of `settings_of`."""
    model, norm = settings.model, settings.max_grad_norm
    return {
        "output_dir": str(directory),
        "use_cpu": cpu,
        "ddp_find_unused_parameters": False,  # the towers of other modalities are frozen
        "max_steps": until,
        "per_device_train_batch_size": 1,  # one micro-batch, however many rows it has
        "gradient_accumulation_steps": accumulation,
        "gradient_checkpointing": model.remat != "none",
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if model.remat != "none" else None,
        # As in train.py, the adapters of a bfloat16 base are float32 and computed in float32: no autocast.
        "bf16": settings.master_weights,
        # Without clipping, the norm is still measured.
        "max_grad_norm": math.inf if norm is None else norm,
        # At 0 the model does not compute this loss, even if its config.json asks for it.
        "router_aux_loss_coef": settings.train.router_aux_loss_coef,
        "seed": settings.train.seed,
        "save_strategy": "steps",
        "save_steps": settings.checkpoint.every_steps,
        "save_total_limit": settings.checkpoint.keep,
        "eval_strategy": "no",
        "metric_for_best_model": "eval_loss" if settings.train.early_stopping else None,
        "greater_is_better": False if settings.train.early_stopping else None,
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "ignore_data_skip": True,  # the data set of a resumed run starts at the next step
    }


def trainable_model(
    base: HFCheckpoint, settings: TrlSettings, adapter: Path | str | None, initial: Pairs | None = None
) -> Any:
    """Load transformers' model with the recipe's adapters and their initial values, or with all of its text
    weights trainable, in float32 if there are master weights.

    Args:
        adapter: folder or address of the PEFT adapter to start from; None for the recipe's initial values.
        initial: those values, if they are a part of the base's weights.

    Raises:
        UserError: the model cannot be loaded, or the adapter does not match the recipe's.
    """
    model, lora = settings.model, settings.lora
    if lora is None:
        whole = load_model(base, model, dtype="float32" if settings.master_weights else None)
        full_parameters(whole, base, model.trainable_modules)
        return whole
    values = initial or start(base, lora, settings.train.seed, adapter)
    options = {} if model.quantization is None else {"quantization_config": _nf4(base, model)}
    loaded = load_model(base, model, **options)
    for module in loaded.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # Evaluation on a CPU would pack the weights for bfloat16 products, which have no gradient.
            module.support_avx512bf16_for_cpu = False
    attached = attach(loaded, base, model, lora)
    set_adapters(attached, base, values)
    if initial is not None:
        set_base(attached, base, lora, residual(base, lora, initial))
    return attached


def reference_model(base: HFCheckpoint, settings: TrlSettings) -> Any:
    """Load a frozen copy of full fine-tuning's initial model, for an objective that compares with it. Return
    None if the objective does not, or if disabling the adapters gives that model. PEFT then also computes
    with the embedding's own rows."""
    if settings.lora is not None or not keeps_copy(settings.train, settings.lora):
        return None
    model = trainable_model(base, settings, None).requires_grad_(False).eval()
    model.disable_adapter = nullcontext  # the method of a model with adapters; this one has none
    return model


def _nf4(base: HFCheckpoint, model: ModelSettings) -> Any:
    """Return bitsandbytes' nf4 for the weights that train.py quantizes: blocks of 64, single quantization."""
    from transformers import BitsAndBytesConfig

    prefix = text_prefix(base)
    quantized = {f"{prefix}{target.name}" for target in base.family.lora_targets(base.architecture)}
    others = [
        name
        for name, module in load_model(base, model, meta=True).named_modules()
        if isinstance(module, torch.nn.Linear) and name not in quantized
    ]
    dtype = getattr(torch, model.dtype)
    try:
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=False,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_storage=dtype,  # FSDP shards only floating-point types
            llm_int8_skip_modules=others,
        )
    except ImportError as error:
        raise UserError(
            f"model.quantization: nf4 needs bitsandbytes ({error})",
            "install the packages of baseline/requirements-trl.txt",
        ) from None
