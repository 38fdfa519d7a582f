"""Verify a merge against the trained model: `merge.py --verify`. This needs no torch.

It hashes the files first. Then it compares tensors with an independent computation
(runtime.merging.sampling). If memory allows, it compares the model's logits with those of the trained model
(runtime.merging.logits).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoints.adapter_reader import TrainedAdapters
from ..errors import UserError
from ..memory import available_memory
from ..progress import readable_size
from ..settings import ModelSettings
from ..weights.checkpoint import HFCheckpoint
from .logits import SPACING, LogitDifferences, compare, logits_bytes, start_mesh
from .merged_files import UNUSABLE, check_files
from .sampling import check_tensors

if TYPE_CHECKING:
    from ..checkpoints.full import TrainedWeights


def verify_merge(
    base: HFCheckpoint,
    trained: TrainedAdapters | TrainedWeights,
    folder: Path,
    model: ModelSettings,
    dtype: str,
    record: Mapping[str, Any],
    tell: Callable[[dict[str, Any]], object] = lambda figures: None,
) -> int:
    """Check files, then tensors, then logits, and report each; return the exit status.

    Logits are skipped, with a note, if the machine has less memory than `logits_bytes`, and for quantized
    weights, which were already compared with float64 values.

    Args:
        folder: the merged checkpoint's folder.
        model: the recipe's `model` section.
        dtype: type of the merged tensors.
        record: content of the folder's merge.json.
        tell: takes the figures, as they are known, under names of run.json's `verified`.

    Raises:
        UserError: when the merge differs from what was trained.
    """
    size, files = check_files(folder, record), len(record["files"])
    print(f"files: {files}, {readable_size(size, ' ')}, are those that were written (SHA-256)")
    sampled = check_tensors(base, trained, folder, dtype)
    tell({"files": files, "bytes": size, "tensors": asdict(sampled)})
    print(
        f"tensors: {sampled.trained:,} of {sampled.trained_of:,} trained ones are right in "
        f"{sampled.elements:,} elements: largest difference from float64 {sampled.largest:.1e}, all within "
        f"one rounding, {sampled.off:,} not the nearest number; {sampled.kept:,} of {sampled.kept_of:,} "
        "others are the base's"
    )
    if trained.no_op:
        print(f"warning: the adapters of step {trained.step} are all zero: the merged model is the base")
    reason = None
    if record.get("quantization") is not None:
        reason = f"the merged weights are {record['quantization']}"
    else:
        mesh = start_mesh(trained.record)
        if mesh.devices.flat[0].platform == "cpu":
            need, available = logits_bytes(base, trained), available_memory()
            if available is not None and need > available:
                sizes = readable_size(need, " "), readable_size(available, " ")
                reason = "they need about {}, {} are available".format(*sizes)
    if reason is not None:
        tell({"logits_left_out": reason})
        print(f"note: logits are not compared: {reason}")
        print(f"verified: {files} files and {sampled.trained + sampled.kept:,} tensors, not logits")
        return 0
    merged = HFCheckpoint.open(folder)
    merged.verify()
    found = compare(base, trained, merged, model, dtype, mesh)
    tolerances = {"rule_tolerance": found.rule_tolerance, "files_tolerance": found.files_tolerance}
    tell({"logits": asdict(found) | tolerances})
    return _report(folder, trained, found)


def _report(folder: Path, trained: TrainedAdapters | TrainedWeights, found: LogitDifferences) -> int:
    if not found.rule <= found.rule_tolerance:
        raise UserError(
            f"{folder}: the merge rule is not what was trained: logits differ by {found.rule:.1e}, "
            f"allowed are {found.rule_tolerance:.1e}",
            "do not use the merged checkpoint",
        )
    if not found.files <= found.files_tolerance:
        raise UserError(
            f"{folder}: is not what was trained: logits differ by {found.files:.1e} from those of the merge "
            f"in memory, allowed are {found.files_tolerance:.1e}",
            UNUSABLE,
        )
    what = "the adapters" if isinstance(trained, TrainedAdapters) else "the trained weights"
    if not trained.no_op and found.effect <= found.merged:
        print(
            f"warning: rounding to {found.dtype} moves logits by {found.merged:.1e}, {what} by "
            f"{found.effect:.1e}: little of what was trained is in the merged model"
        )
    elif not trained.no_op and found.moved == 0:
        raise UserError(f"{folder}: equals the base, although {what} change it", UNUSABLE)
    line = f"verified: max logits difference {found.rule:.1e} (tolerance {found.rule_tolerance:.1e})"
    if SPACING[found.dtype]:
        line += f", rounded to {found.dtype} {found.merged:.1e}"
        line += f", files {found.files:.1e} (tolerance {found.files_tolerance:.1e})"
    print(f"{line}; {what} change logits by {found.effect:.1e} of {found.largest:.1e}")
    return 0
