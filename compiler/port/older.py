"""Older names of keys that mean the same: files that were written for earlier versions of a tool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from compiler.port.ledger import Ledger
from compiler.port.source import MISSING, Source
from compiler.wording import flow
from spec.diagnostics import Diagnostic

_TRAINER = {
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "adafactor": "optim",
}

NAMES: Mapping[str, Mapping[str, str]] = {
    "trainer": _TRAINER,
    "trl": {
        **_TRAINER,
        "max_seq_length": "max_length",
        "torch_dtype": "dtype",
        "use_flash_attention_2": "attn_implementation",
        "use_liger": "use_liger_kernel",
        "use_liger_loss": "use_liger_kernel",
        "dataset_train_name": "dataset_train_split",
        "dataset_test_name": "dataset_test_split",
        "peft_lora_r": "lora_r",
        "peft_lora_alpha": "lora_alpha",
    },
    "llamafactory": {
        **_TRAINER,
        "prompt_template": "template",
        "sft_packing": "packing",
        "train_last_turn_only": "mask_history",
        "dpo_beta": "pref_beta",
        "orpo_beta": "pref_beta",
        "kto_beta": "pref_beta",
        "dpo_loss": "pref_loss",
        "dpo_ftx": "pref_ftx",
        "kto_ftx": "pref_ftx",
        "dpo_ref_model": "ref_model",
        "ref_model_checkpoint": "ref_model_adapters",
        "dev_ratio": "val_size",
        "lora_lr_ratio": "loraplus_lr_ratio",
        "neft_alpha": "neftune_noise_alpha",
        "cache_path": "tokenized_path",
        "checkpoint_dir": "adapter_name_or_path",
        "name_module_trainable": "freeze_trainable_modules",
        "num_layer_trainable": "freeze_trainable_layers",
        "hf_auth_token": "hf_hub_token",
        "swanlab_experiment_name": "swanlab_run_name",
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

VALUES = {
    "use_flash_attention_2": {True: "flash_attention_2", False: "sdpa"},
    "adafactor": {True: "adafactor"},
}
"""Of older names that were switches, what their values are now; at others they have no newer name."""


def renamed(source: Source, dialect: str) -> Source:
    """A file with today's names; an older name stays where the newer one stands beside it."""
    if not isinstance(source.data, dict):
        return source
    names: dict[str, str] = {}
    data: dict[str, Any] = {}
    for key, value in source.data.items():
        new = NAMES.get(dialect, {}).get(key) if _today(key, value) is not MISSING else None
        if new and new not in source.data and new not in data:  # of two older names the first is taken
            names[key], key, value = new, new, _today(key, value)
        data[key] = value
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


def beside(ledger: Ledger, dialect: str) -> Iterator[Diagnostic]:
    """Says of the older names that stand beside their newer ones that these hold; warns of other values."""
    source = ledger.sources.main
    for old, new in NAMES.get(dialect, {}).items():
        value = _today(old, source.get(old))
        if value is MISSING or not source.has(new):
            continue
        stands = source.older.get(new, new)
        if value is None or value == source.get(new):
            says = "says nothing, being null" if value is None else f"says the same as {stands}"
            ledger.exact(source, old, note=f"an older name of {new}, which {says}")
            continue
        note = f"an older name of {new}: {stands} holds"
        ledger.unsupported(source, old, note)
        message = f"`{old}` is an older name of `{new}`, and `{stands}: {flow(source.get(new))}` is taken"
        yield Diagnostic("W1194", message, old, f"remove `{old}`, or `{stands}`", source.span(old))


def _today(key: str, value: Any) -> Any:
    """The value that an older name's value is now, MISSING for none."""
    if key not in VALUES:
        return value
    return VALUES[key].get(value, MISSING) if isinstance(value, bool) else MISSING


def _moved(path: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        if path == old or path.startswith((f"{old}.", f"{old}[")):
            return new + path[len(old) :]
    return path
