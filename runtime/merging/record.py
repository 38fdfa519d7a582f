"""The inputs of a merge: the identity by which a second run recognizes it, and merge.json."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from etils import epath

from ..checkpoints import manifest
from ..checkpoints.adapter_reader import ITEM, TrainedAdapters
from ..weights.checkpoint import CONFIG, HFCheckpoint
from .journal import Files

if TYPE_CHECKING:
    from ..checkpoints.full import TrainedWeights
    from .job import MergeJob

VERSION = 1
"""The version of merge.json."""

SAMPLES, SAMPLE_BYTES = 32, 4096
"""Number of evenly spread places in a checkpoint's weights, and bytes of each, that identify it."""

Trained: TypeAlias = "TrainedAdapters | TrainedWeights"


@dataclass(frozen=True)
class MergeSettings:
    """The part of a recipe's `merge` section that decides what is written.

    Attributes:
        dtype: type of the merged weights, "bfloat16" or "float32".
        max_shard_size: limit of one file, "5GB" and the like, or "base" for the base's own split.
        quantization: "fp8" or "int8" for linear weights, None for `dtype`.
        chat_template: the recipe's own, which replaces the base's; None if it trained with the tokenizer's.
    """

    dtype: str
    max_shard_size: str
    quantization: str | None = None
    chat_template: str | None = None


def identity(base: HFCheckpoint, directory: str, trained: Trained, settings: MergeSettings) -> dict[str, Any]:
    """Return everything that the output depends on, under names for messages.

    Args:
        directory: the run's checkpoint directory.
    """
    template = settings.chat_template
    return {
        "base": base_digest(base),
        "step": trained.step,
        "checkpoint": checkpoint_digest(directory, trained),
        "recipe": hashlib.sha256(trained.lock).hexdigest(),
        "dtype": settings.dtype,
        "max_shard_size": settings.max_shard_size,
        "quantization": settings.quantization,
        "chat_template": template and hashlib.sha256(template.encode()).hexdigest(),
    }


def base_digest(base: HFCheckpoint) -> str:
    """Return a SHA-256 of config.json, each file's name, size and header, and a small part of the weights.

    The weights are included because two models of one architecture may differ only in them.
    """
    digest = hashlib.sha256(base.side_file(CONFIG))
    each = -(-SAMPLES // len(base.headers))
    for file, header in base.headers.items():
        digest.update(f"{file} {header.size}\n".encode())
        digest.update(header.raw)
        for number in range(each):
            start = header.data_start + (header.size - header.data_start) * (2 * number + 1) // (2 * each)
            digest.update(base.store.read(file, start, min(start + SAMPLE_BYTES, header.size)))
    return digest.hexdigest()


def checkpoint_digest(directory: str, trained: Trained) -> str | None:
    """Return the SHA-256 of a step's SHA256SUMS, or of the arrays if another program saved it without one."""
    sums = epath.Path(directory) / str(trained.step) / ITEM / manifest.SUMS
    if sums.exists():
        return hashlib.sha256(sums.read_bytes()).hexdigest()
    if not isinstance(trained, TrainedAdapters):
        return None
    digest = hashlib.sha256()
    for arrays in (trained.arrays, {path: (array,) for path, array in trained.whole.items()}):
        for path in sorted(arrays):
            for array in arrays[path]:
                digest.update(array.tobytes())
    return digest.hexdigest()


def merge_record(job: MergeJob, files: Files) -> dict[str, Any]:
    """Return the content of merge.json.

    Args:
        files: size and SHA-256 of every written file except merge.json.
    """
    return {
        "merge": VERSION,
        "identity": dict(job.identity),
        "base": {
            "id": job.model.id,
            "revision": job.model.revision,
            "files": {file: {"size": header.size} for file, header in job.base.headers.items()},
        },
        "checkpoint": {"step": job.trained.step, "sha256": job.identity["checkpoint"]},
        "lora": _lora(job.trained),
        "dtype": job.settings.dtype,
        "quantization": job.settings.quantization,
        "max_shard_size": job.settings.max_shard_size,
        "tensors": {"merged": job.plan.merged, "kept": job.plan.copied, "quantized": job.plan.quantized},
        "recipe": {"name": job.trained.record.get("name"), "sha256": job.identity["recipe"]},
        "files": dict(sorted(files.items())),
    }


def _lora(trained: Trained) -> dict[str, Any] | None:
    if not isinstance(trained, TrainedAdapters):
        return None
    lora = trained.settings
    return {
        "rank": lora.rank,
        "alpha": lora.alpha,
        "rslora": lora.rslora,
        "rank_pattern": dict(lora.rank_pattern),
        "alpha_pattern": dict(lora.alpha_pattern),
        "targets": list(lora.targets),
        "quantize": lora.quantize,
    }
