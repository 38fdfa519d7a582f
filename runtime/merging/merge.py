"""Merge trained weights into the base checkpoint, and write adapters as a PEFT adapter: merge.py.

W[out, in] += scale * (B[out, rank] @ A[rank, in]), in float32, cast once. After full fine-tuning the trained
tensors replace the base's. Untrained tensors are copied byte for byte. If a merge was stopped, the same
command continues it after the last complete file.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..addresses import check_uploads, is_address, read_by_orbax
from ..build_check import demand_whole
from ..checkpoints.saved_steps import LATEST, step_losses
from ..checkpoints.trained_weights import TrainedAdapters, load_trained, with_trained_tower
from ..errors import UserError, guarded, say
from ..interrupts import Interrupted, Interrupts
from ..metrics import run_facts
from ..peft.importing import import_adapter
from ..peft.peft_names import refuse_rows
from ..progress import readable_size
from ..settings import ModelSettings
from ..weights.locate import open_base
from .arithmetic import use_host_only
from .compressed_tensors import FORMATS
from .file_plan import plan_merge
from .job import MergeJob, MergeSettings, adapter_bytes, identity, merge, needed, output_folder
from .tokenizer_files import own_files
from .verify import verify_merge

GOES_ON = "the same command continues after the complete files"
STOPPING = (signal.SIGINT,)
"""Signals that a merge answers with GOES_ON. Any other may end it at once: each file is complete or
absent."""


def main(
    artifact: Path,
    model: ModelSettings,
    *,
    checkpoint: str,
    output: str,
    dtype: str,
    adapter: bool = False,
    max_shard_size: str = "5GB",
    quantization: str | None = None,
    chat_template: str | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """Run a generated merge.py; return its exit status.

    Args:
        artifact: the folder of the script.
        model: the base model.
        checkpoint, output: `checkpoint.directory` and `merge.output` of the recipe; relative ones are
            relative to --output, by default the artifact's folder.
        adapter: whether to write the PEFT adapter as well, next to the merged folder.
        dtype, max_shard_size, quantization, chat_template: see `MergeSettings`.
        argv: arguments; None takes sys.argv's.
    """
    arguments = parse_arguments(artifact, argv)
    settings = MergeSettings(dtype, max_shard_size, quantization, chat_template)
    farewell = f"interrupted: {'nothing was imported' if arguments.import_adapter else GOES_ON}"
    with Interrupts(lambda signum: farewell, STOPPING):
        try:
            if arguments.import_adapter:
                return guarded(lambda: import_peft(arguments, model, artifact, checkpoint))
            return guarded(lambda: run(arguments, model, artifact, checkpoint, output, settings, adapter))
        except Interrupted as interrupted:
            say(f"\n{farewell}")
            return 128 + interrupted.signum


def parse_arguments(artifact: Path, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the paths and the step; the checkpoint's record says what was trained."""
    parser = argparse.ArgumentParser(
        prog="merge.py",
        description="Merges a trained checkpoint into the base model's safetensors.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--checkpoint", metavar="DIR", help="folder of the run's checkpoints, or its gs:// address"
    )
    parser.add_argument(
        "--step",
        default=LATEST,
        metavar="N",
        help="latest (default), best (lowest eval loss, or highest eval reward), or a step",
    )
    parser.add_argument(
        "--model", metavar="DIR", help="folder of the base checkpoint, or an address such as gs://..."
    )
    parser.add_argument(
        "--output",
        default=str(artifact),
        metavar="DIR",
        help="working folder, as given to train.py, or an address (default: this script's folder)",
    )
    parser.add_argument(
        "--import-adapter",
        metavar="DIR",
        help="write a PEFT adapter (a folder, or an address) as step 0 of the run, for train.py --resume; "
        "nothing is merged",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be written, and stop")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="then check the files, compute the tensors in a second way, and compare the logits with the "
        "trained model's",
    )
    arguments = parser.parse_args(argv)
    if arguments.import_adapter and (arguments.verify or arguments.dry_run or arguments.step != LATEST):
        parser.error("--import-adapter merges nothing: it cannot be used with --step, --verify or --dry-run")
    return arguments


def import_peft(arguments: argparse.Namespace, model: ModelSettings, artifact: Path, checkpoint: str) -> int:
    """Write a PEFT adapter as step 0 of the run, for `train.py --resume`; return the exit status."""
    directory = arguments.checkpoint or under(arguments.output, checkpoint)
    check_uploads(directory)
    base = open_base(model, arguments.model)
    base.verify()
    demand_whole(artifact)
    return import_adapter(arguments.import_adapter, base, artifact, directory)


def run(
    arguments: argparse.Namespace,
    model: ModelSettings,
    artifact: Path,
    checkpoint: str,
    output: str,
    settings: MergeSettings,
    adapter: bool,
) -> int:
    """Merge, export and, if requested, verify.

    Raises:
        UserError: when an input is missing or does not fit, or the output has other content.
    """
    demand_whole(artifact)
    if not arguments.verify:
        # Adapters are read on the host: the TPU is neither occupied nor needed.
        use_host_only()
    trained = arguments.checkpoint or under(arguments.output, checkpoint)
    target = under(arguments.output, output)
    check_uploads(target, trained)  # the result of the merge is also noted next to the run's checkpoints
    if is_address(trained) and not read_by_orbax(trained):
        raise UserError(
            f"{trained}: checkpoints are read from a folder or from gs://, where train.py writes them",
            "copy the run to this machine, and give its folder with --checkpoint",
        )
    job = _job(arguments, model, artifact, trained, target, settings, adapter)
    if arguments.dry_run:
        print(described(job))
        return 0
    record = merge(job)
    run_facts.merged(trained, _facts(job))
    return _verified(job, trained, record) if arguments.verify else 0


def _verified(job: MergeJob, directory: str, record: Mapping[str, Any]) -> int:
    """Verify a merge, and record the result next to the run's checkpoints."""
    result: dict[str, Any] = {}
    folder, dtype = Path(job.target.name), job.settings.dtype
    try:
        return verify_merge(job.base, job.trained, folder, job.model, dtype, record, result.update)
    except UserError as error:
        result["problem"] = error.message
        raise
    finally:
        if result:
            run_facts.merged(directory, _facts(job) | {"verified": result})


def _facts(job: MergeJob) -> dict[str, Any]:
    """Return a merge's facts in the form of `run_facts.merged`."""
    return {
        "step": job.trained.step,
        "folder": job.target.name,
        "adapter": job.adapter.name if job.adapter else None,
        "dtype": job.settings.dtype,
        "quantization": job.settings.quantization,
        "bytes": job.plan.size,
        "tensors": job.plan.merged,
        "kept": job.plan.copied,
        "quantized": job.plan.quantized,
        "verified": None,
    }


def _job(
    arguments: argparse.Namespace,
    model: ModelSettings,
    artifact: Path,
    directory: str,
    target: str,
    settings: MergeSettings,
    adapter: bool,
) -> MergeJob:
    base = with_trained_tower(directory, open_base(model, arguments.model))
    base.verify()
    trained = load_trained(directory, arguments.step, base)
    if adapter and not isinstance(trained, TrainedAdapters):
        raise UserError(
            f"{directory}: the run trained all weights: it has no LoRA that a PEFT adapter could hold",
            "set merge.adapter to false",
        )
    if adapter and isinstance(trained, TrainedAdapters):
        refuse_rows(base, base.name, trained.settings)
    if arguments.verify and "://" in target:
        raise UserError(
            f"{target}: --verify reads the merged files from a local disk",
            "merge to a folder with --verify, and copy it to the bucket",
        )
    encoding = None
    if settings.quantization is not None:
        encoding = FORMATS[settings.quantization]
    replacing: Mapping[str, bytes] = {}
    tokenizer = trained.record["recipe"].get("model", {}).get("tokenizer")
    if tokenizer is not None or settings.chat_template is not None:
        replacing = own_files(tokenizer, settings.chat_template, artifact)
    ends = run_facts.ends(directory)
    return MergeJob(
        base,
        model,
        trained,
        settings,
        plan_merge(base, trained.changes(base), settings.dtype, settings.max_shard_size, encoding),
        encoding,
        identity(base, directory, trained, settings, ends),
        output_folder(target),
        output_folder(f"{target.rstrip('/')}-adapter") if adapter else None,
        replacing,
        step_losses(directory, trained.step),
        ends,
    )


def described(job: MergeJob) -> str:
    """Describe what a merge would write, for --dry-run."""
    base, plan, trained, folder = job.base, job.plan, job.trained, job.target
    lora = f", LoRA of rank {trained.settings.rank}" if isinstance(trained, TrainedAdapters) else ""
    changed = f"{plan.merged:,} tensors changed by training, {plan.copied:,} as the base has them"
    if plan.quantized:
        changed += f", {plan.quantized:,} in {job.settings.quantization}"
    free, stored = folder.free(), sum(header.size for header in base.headers.values())
    lines = {
        "base": f"{base.name}: {readable_size(stored)}, {_files(len(base.headers))}, "
        f"{len(base.tensors):,} tensors",
        "trained": f"step {trained.step}{lora}",
        "output": f"{folder.name}: {readable_size(plan.size)}, {_files(len(plan.shards))}; {changed}",
        "adapter": f"{job.adapter.name}: {readable_size(adapter_bytes(job))}" if job.adapter else None,
        "disk": f"{readable_size(needed(job))} needed, "
        + (f"{readable_size(free)} free" if free is not None else "free space not known"),
    }
    return "\n".join(f"{name:8} {line}" for name, line in lines.items() if line)


def under(working: str, path: str) -> str:
    """Return a path of the recipe: unchanged if absolute or an address, else below the working folder."""
    if "://" in path or Path(path).expanduser().is_absolute():
        return path
    if "://" in working:
        return f"{working.rstrip('/')}/{path}"
    return str(Path(working).expanduser() / path)


def _files(count: int) -> str:
    return f"{count:,} file{'' if count == 1 else 's'}"
