"""Merge the miniature's trained adapters with merge.py's own functions, and verify the merge."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from ..checkpoints.trained_weights import TrainedAdapters
from ..errors import UserError
from ..merging.file_plan import plan_merge
from ..merging.job import MergeJob, MergeSettings, identity, merge, output_folder
from ..merging.merged_files import check_files
from ..merging.tensor_samples import check_tensors
from ..merging.verify import compare
from ..settings import RunSettings
from ..weights.checkpoint import HFCheckpoint
from .compare_numbers import STEPS, Outcome


def merged(
    base: HFCheckpoint,
    miniature: Outcome,
    settings: RunSettings,
    lock: Mapping[str, Any],
    mesh: Mesh,
    folder: Path,
) -> dict[str, Any]:
    """Merge into a folder; return how far files, tensors and logits are from the trained miniature.

    Args:
        miniature: the outcome of the miniature in float32.
        lock: recipe.lock.json.
        folder: where the merged model goes.

    Raises:
        UserError: when the merge differs from what was trained.
    """
    assert settings.lora is not None
    trained = TrainedAdapters(
        STEPS,
        lock,
        json.dumps(lock).encode(),
        settings.lora,
        miniature.built.adapters,
        {
            adapter.target.weight: tuple(miniature.trained[path] for path, *_ in adapter.arrays)
            for adapter in miniature.built.adapters
        },
        miniature.built.whole,
        {parameter.path: miniature.trained[parameter.path] for parameter in miniature.built.whole},
    )
    how = MergeSettings(lock["recipe"]["merge"]["dtype"], "5GB")
    plan = plan_merge(base, trained.changes(base), how.dtype, how.max_shard_size, None)
    named = identity(base, str(folder), trained, how)
    job = MergeJob(base, settings.model, trained, how, plan, None, named, output_folder(folder), None)
    with contextlib.redirect_stdout(io.StringIO()):
        record = merge(job)
    check_files(folder, record)
    sampled = check_tensors(base, trained, folder, how.dtype)
    logits = compare(base, trained, HFCheckpoint.open(folder), settings.model, how.dtype, mesh)
    for what, value, allowed in (
        ("in memory", logits.rule, logits.rule_tolerance),
        ("from its files", logits.files, logits.files_tolerance),
    ):
        if not value <= allowed:
            raise UserError(
                f"the merged miniature's logits {what} differ from what was trained by {value:.1e} "
                f"(allowed {allowed:.1e})"
            )
    return {
        "files": len(record["files"]),
        "tensors": sampled.trained + sampled.kept,
        "dtype": how.dtype,
        "logits": logits.rule,
        "logits_allowed": logits.rule_tolerance,
        "effect": logits.effect,
    }
