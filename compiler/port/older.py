"""Older names of keys that mean the same: files that were written for earlier versions of a tool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compiler.port.source import Source

_TRAINER = {
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "use_liger": "use_liger_kernel",
    "xpu_backend": "ddp_backend",
}

NAMES: Mapping[str, Mapping[str, str]] = {
    "trainer": _TRAINER,
    "trl": {
        **_TRAINER,
        "max_seq_length": "max_length",
        "torch_dtype": "dtype",
        "use_liger_loss": "use_liger_kernel",
        "dataset_train_name": "dataset_train_split",
        "dataset_test_name": "dataset_test_split",
        "peft_lora_r": "lora_r",
        "peft_lora_alpha": "lora_alpha",
        "peft_lora_dropout": "lora_dropout",
    },
    "llamafactory": {
        **_TRAINER,
        "sft_packing": "packing",
        "dpo_beta": "pref_beta",
        "orpo_beta": "pref_beta",
        "dpo_loss": "pref_loss",
        "dpo_ftx": "pref_ftx",
        "dev_ratio": "val_size",
        "neft_alpha": "neftune_noise_alpha",
        "cache_path": "tokenized_path",
        "checkpoint_dir": "adapter_name_or_path",
        "name_module_trainable": "freeze_trainable_modules",
        "num_layer_trainable": "freeze_trainable_layers",
    },
    "axolotl": {
        "evaluation_strategy": "eval_strategy",
        "noisy_embedding_alpha": "neftune_noise_alpha",
        "sequence_parallel_degree": "context_parallel_size",
        "dataset_processes": "dataset_num_proc",
        "eval_table_max_new_tokens": "eval_max_new_tokens",
    },
}
"""By dialect, the name that an older name has now."""

FLASH = "use_flash_attention_2"
"""Of TRL's users and transformers' older models: a switch in place of `attn_implementation`."""


def renamed(source: Source, dialect: str) -> Source:
    """A file with today's names; an older name stays where the newer one stands beside it."""
    if not isinstance(source.data, dict):
        return source
    names = {
        old: new
        for old, new in NAMES.get(dialect, {}).items()
        if source.has(old) and not source.has(new) and old in source.data
    }
    data: dict[str, Any] = {}
    for key, value in source.data.items():
        if str(names.get(key, key)) in data:  # two older names of one key: the first is taken
            names.pop(key, None)
        data[str(names.get(key, key))] = value
    flash = dialect == "trl" and isinstance(data.get(FLASH), bool) and "attn_implementation" not in data
    if flash:
        names[FLASH] = "attn_implementation"
        data = {
            names[FLASH] if key == FLASH else key: ("flash_attention_2" if value else "sdpa")
            if key == FLASH
            else value
            for key, value in data.items()
        }
    if not names:
        return source

    def moved(places: Mapping[str, Any]) -> dict[str, Any]:
        return {_moved(path, names): place for path, place in places.items()}

    older = {new: old for old, new in names.items()}
    return replace(
        source,
        data=data,
        spans=moved(source.spans),
        keys=moved(source.keys),
        secrets=moved(source.secrets),
        older=older,
    )


def _moved(path: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        if path == old or path.startswith((f"{old}.", f"{old}[")):
            return new + path[len(old) :]
    return path
