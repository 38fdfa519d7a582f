"""Merges what was trained into its base checkpoint, and writes adapters as a PEFT adapter: merge.py.

W[out, in] += scale * (B[out, rank] @ A[rank, in]), in float32, cast once; after full fine-tuning the
trained tensors take the base's place. Tensors that were not trained are the base's byte for byte. A merge
that was stopped is continued by the same command, after the last file that is whole.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.checkpoint import CONFIG, INDEX, BaseCheckpoint
from runtime.errors import UserError, guarded
from runtime.export.card import adapter_card, model_card
from runtime.export.estimate import estimated_seconds
from runtime.export.folder import OutputFolder, output_folder, refused
from runtime.export.journal import JOURNAL, RECORD, Files, Journal, begin, examine, finished
from runtime.export.known import BaseSums, DamagedBase, known_hashes
from runtime.export.plan import Plan, plan_merge
from runtime.export.quantized import Quantization, quantization
from runtime.export.record import MergeSettings, Trained, identity, merge_record
from runtime.export.writer import Sink, write_shards
from runtime.locate import open_base
from runtime.peft_export import ADAPTER_CONFIG, WEIGHTS, adapter_config, config_bytes, write_weights
from runtime.progress import duration
from runtime.safetensors_reader import DTYPES
from runtime.settings import ModelSettings
from runtime.staging import staged
from runtime.trained import LATEST, LOCK, Delta, TrainedAdapters, load_trained

CARD = "README.md"
CHAT_TEMPLATE = "chat_template.jinja"
"""Where transformers and vLLM look for a template first, before tokenizer_config.json."""
NOT_CARRIED = (CARD, CONFIG, RECORD, JOURNAL, LOCK, "SHA256SUMS")
"""Side files of a base that are not its output's."""
ADAPTER_FILES = (WEIGHTS, CARD, LOCK, RECORD, ADAPTER_CONFIG)
GOES_ON = "the same command goes on after the files that are whole"
SPARE_BYTES = 64 << 20
"""Left free on the disk besides the weights, for side files."""


@dataclass(frozen=True)
class Job:
    """One merge: what goes in, and where it goes.

    Attributes:
        base, model: the base checkpoint, and the recipe's `model` section.
        trained: what was trained.
        settings: what is written.
        plan: of the weights.
        quantization: as the plan has it.
        identity: of the merge, see `runtime.export.record.identity`.
        target: folder of the merged weights.
        adapter: folder of the PEFT adapter, None for none.
    """

    base: BaseCheckpoint
    model: ModelSettings
    trained: Trained
    settings: MergeSettings
    plan: Plan
    quantization: Quantization | None
    identity: Mapping[str, Any]
    target: OutputFolder
    adapter: OutputFolder | None


def main(
    artifact: Path,
    model: ModelSettings,
    *,
    checkpoint: str,
    output: str,
    dtype: str,
    adapter: bool,
    max_shard_size: str = "5GB",
    quantization: str | None = None,
    chat_template: str | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """Runs a generated merge.py; returns its exit status.

    Args:
        artifact: the folder of the script.
        model: the base.
        checkpoint, output: `checkpoint.directory` and `merge.output` of the recipe; relative ones are
            relative to --output, by default the artifact's folder.
        adapter: whether the PEFT adapter is written as well, beside the merged folder.
        dtype, max_shard_size, quantization, chat_template: see `MergeSettings`.
        argv: arguments, sys.argv's when None.
    """
    arguments = parse_arguments(artifact, argv)
    settings = MergeSettings(dtype, max_shard_size, quantization, chat_template)
    try:
        if arguments.import_adapter:
            return guarded(lambda: import_peft(arguments, model, artifact, checkpoint))
        return guarded(lambda: run(arguments, model, checkpoint, output, settings, adapter))
    except KeyboardInterrupt:
        done = "nothing was imported" if arguments.import_adapter else GOES_ON
        print(f"\ninterrupted: {done}", file=sys.stderr)
        return 130


def parse_arguments(artifact: Path, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The paths and the step; what was trained comes from the checkpoint's record."""
    parser = argparse.ArgumentParser(
        prog="merge.py",
        description="Merges what a checkpoint was trained to into the base model's safetensors.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--checkpoint", metavar="DIR", help="folder of the run's checkpoints, or an address such as gs://..."
    )
    parser.add_argument(
        "--step", default=LATEST, metavar="N", help="latest (default), best (lowest eval loss), or a step"
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
        help="then check the files, compare tensors with another computation of them, and logits with those "
        "of what was trained",
    )
    arguments = parser.parse_args(argv)
    if arguments.import_adapter and (arguments.verify or arguments.dry_run or arguments.step != LATEST):
        parser.error("--import-adapter merges nothing: --step, --verify and --dry-run do not go with it")
    return arguments


def import_peft(arguments: argparse.Namespace, model: ModelSettings, artifact: Path, checkpoint: str) -> int:
    """Writes a PEFT adapter as step 0 of the run, for `train.py --resume`; returns the exit status."""
    from runtime.peft_import import import_adapter

    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    base = open_base(model, arguments.model)
    base.verify()
    directory = arguments.checkpoint or under(arguments.output, checkpoint)
    return import_adapter(arguments.import_adapter, base, artifact, directory)


def run(
    arguments: argparse.Namespace,
    model: ModelSettings,
    checkpoint: str,
    output: str,
    settings: MergeSettings,
    adapter: bool,
) -> int:
    """Merges, exports and, when asked, verifies.

    Raises:
        UserError: when an input is missing or does not fit, or the output holds something else.
    """
    if not arguments.verify:
        # Adapters are read on the host: do not occupy the TPU, nor need one.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with staged(arguments.checkpoint or under(arguments.output, checkpoint), arguments.step) as directory:
        job = _job(arguments, model, directory, under(arguments.output, output), settings, adapter)
        if arguments.dry_run:
            print(described(job))
            return 0
        record = merge(job)
        if arguments.verify:
            from runtime.verify import verify_merge

            return verify_merge(
                job.base, job.trained, Path(job.target.name), job.model, settings.dtype, record
            )
    return 0


def _job(
    arguments: argparse.Namespace,
    model: ModelSettings,
    directory: str,
    target: str,
    settings: MergeSettings,
    adapter: bool,
) -> Job:
    base = open_base(model, arguments.model)
    base.verify()
    trained = load_trained(directory, arguments.step, base)
    if adapter and not isinstance(trained, TrainedAdapters):
        raise UserError(
            f"{directory}: the run trained all weights: it has no LoRA that a PEFT adapter could hold",
            "set merge.adapter to false",
        )
    if arguments.verify and "://" in target:
        raise UserError(
            f"{target}: --verify reads the merged files from a local disk",
            "merge to a folder with --verify, and copy it to the bucket",
        )
    encoding = quantization(settings.quantization)
    return Job(
        base,
        model,
        trained,
        settings,
        plan_merge(base, trained.changes(base), settings.dtype, settings.max_shard_size, encoding),
        encoding,
        identity(base, directory, trained, settings),
        output_folder(target),
        output_folder(f"{target.rstrip('/')}-adapter") if adapter else None,
    )


def merge(job: Job) -> Mapping[str, Any]:
    """Writes the folders that are not there yet, and says so; gives the record.

    Raises:
        UserError: when a folder holds something else, or cannot be written.
    """
    started = time.monotonic()
    with job.target.locked():
        record = finished(job.target, job.identity)
        if record is None:
            examine(job.target, job.identity, _planned(job))
        # Both folders are looked at before the first byte: hours later is too late to refuse one.
        with job.adapter.locked() if job.adapter else nullcontext():
            adapter = job.adapter
            if adapter is not None and finished(adapter, job.identity) is not None:
                adapter = None
            if adapter is not None:
                examine(adapter, job.identity, ADAPTER_FILES)
            if record is not None and adapter is None:
                print(f"{job.target.name}: holds this merge already")
                return record
            if record is None:
                record = _write(job, adapter)
            elif adapter is not None:
                _write_adapter(job, adapter)
    _report(job, time.monotonic() - started)
    return record


def _planned(job: Job) -> set[str]:
    """Names of all that a merge writes into its folder."""
    names = {shard.file for shard in job.plan.shards} | {CARD, CONFIG, LOCK, RECORD}
    names |= {name for name in job.base.side_files if name not in NOT_CARRIED}
    names |= {INDEX} if job.plan.index is not None else set()
    return names | ({CHAT_TEMPLATE} if job.settings.chat_template is not None else set())


def _write(job: Job, adapter: OutputFolder | None) -> dict[str, Any]:
    """The folder, and the adapter's where it is not there yet."""
    known = known_hashes(job.base.directory) if isinstance(job.base.directory, Path) else {}
    journal = begin(job.target, job.identity, _planned(job))
    _check_space(job, journal)
    sums = BaseSums(known, job.base.name) if known else None
    try:
        write_shards(job.plan, job.base, journal, job.quantization, sums)
        if sums is not None:
            sums.close()
    except DamagedBase:
        journal.discard(_planned(job))  # what was made of it is damaged as well
        raise
    except OSError as error:
        reason = refused(job.target.name, "written", error)
        state = f"{len(journal.files)} of {len(job.plan.shards)} weight files are whole"
        raise UserError(f"{reason.message}; {state}", reason.help) from error
    finally:
        if sums is not None:
            sums.abandon()
    if adapter is not None:
        _write_adapter(job, adapter)
    return _write_small_files(job, journal, known)


def _write_small_files(job: Job, journal: Journal, known: Mapping[str, str]) -> dict[str, Any]:
    """Everything but the weights: what makes the folder loadable comes last."""
    config: dict[str, Any] = json.loads(job.base.side_file(CONFIG))
    if job.quantization is not None:
        names = {piece.name for piece in job.plan.pieces if piece.quantized}
        config["quantization_config"] = job.quantization.config(job.base, names)
        last = {CONFIG: (json.dumps(config, indent=2) + "\n").encode()}
    else:
        last = {CONFIG: job.base.side_file(CONFIG)}
    if job.plan.index is not None:
        last[INDEX] = job.plan.index
    small = {name: job.base.side_file(name) for name in job.base.side_files if name not in NOT_CARRIED}
    small[LOCK] = job.trained.lock
    if job.settings.chat_template is not None:
        small[CHAT_TEMPLATE] = job.settings.chat_template.encode()
    files: Files = {shard.file: journal.files[shard.file] for shard in job.plan.shards}
    files |= {name: _entry(data) for name, data in (small | last).items()}
    record = _record(job, files, known)
    small[CARD] = model_card(record, job.trained.record, _base_card(job.base)).encode()
    record["files"] = dict(sorted({**files, CARD: _entry(small[CARD])}.items()))
    for name, data in {**small, RECORD: _json(record), **last}.items():
        journal.folder.write(name, data)
    journal.end()
    return record


def _write_adapter(job: Job, folder: OutputFolder) -> None:
    assert isinstance(job.trained, TrainedAdapters)
    deltas = job.trained.deltas()
    journal = begin(folder, job.identity, ADAPTER_FILES)
    try:
        with folder.create(WEIGHTS) as file, Sink(file) as sink:
            write_weights(sink, job.base, deltas)
    except OSError as error:
        raise refused(folder.name, "written", error) from error
    config = adapter_config(job.base, job.model, job.trained.settings, deltas)
    files: Files = {
        WEIGHTS: {"size": sink.size, "sha256": sink.sha256},
        LOCK: _entry(job.trained.lock),
        ADAPTER_CONFIG: _entry(config_bytes(config)),
    }
    record = _record(job, files, {})
    card = adapter_card(record, job.trained.record, config).encode()
    record["files"] = dict(sorted({**files, CARD: _entry(card)}.items()))
    folder.write(LOCK, job.trained.lock)
    folder.write(CARD, card)
    folder.write(RECORD, _json(record))
    folder.write(ADAPTER_CONFIG, config_bytes(config))
    journal.end()


def _record(job: Job, files: Files, known: Mapping[str, str]) -> dict[str, Any]:
    return merge_record(job.identity, job.base, job.model, job.trained, job.settings, job.plan, files, known)


def _base_card(base: BaseCheckpoint) -> str | None:
    if CARD not in base.side_files:
        return None
    return base.side_file(CARD).decode("utf-8", "replace")


def described(job: Job) -> str:
    """What a merge would write, for --dry-run."""
    base, plan, trained, folder = job.base, job.plan, job.trained, job.target
    lora = f", LoRA of rank {trained.settings.rank}" if isinstance(trained, TrainedAdapters) else ""
    changed = f"{plan.merged:,} tensors changed by training, {plan.copied:,} as the base has them"
    if plan.quantized:
        changed += f", {plan.quantized:,} in {job.settings.quantization}"
    free = folder.free()
    seconds = estimated_seconds(plan, base, job.quantization)
    lines = {
        "base": f"{base.name}: {readable_size(base.total_bytes)}, {_files(len(base.headers))}, "
        f"{len(base.tensors):,} tensors",
        "trained": f"step {trained.step}{lora}",
        "output": f"{folder.name}: {readable_size(plan.size)}, {_files(len(plan.shards))}; {changed}",
        "adapter": f"{job.adapter.name}: {readable_size(_adapter_bytes(job))}" if job.adapter else None,
        "disk": f"{readable_size(needed(job))} needed, "
        + (f"{readable_size(free)} free" if free is not None else "free space not known"),
        "time": f"about {duration(max(1.0, seconds))}: an estimate at this machine's pace, its disk apart",
    }
    return "\n".join(f"{name:8} {line}" for name, line in lines.items() if line)


def needed(job: Job, written: Files | None = None) -> int:
    """Bytes that a merge still writes, with some to spare."""
    rest = sum(shard.size for shard in job.plan.shards if shard.file not in (written or {}))
    return SPARE_BYTES + rest + (_adapter_bytes(job) if job.adapter else 0)


def _adapter_bytes(job: Job) -> int:
    deltas = (piece.change for piece in job.plan.pieces if isinstance(piece.change, Delta))
    return sum(delta.a.nbytes + delta.b.nbytes for delta in deltas)


def _check_space(job: Job, journal: Journal) -> None:
    need, free = needed(job, journal.files), job.target.free()
    if free is not None and free < need:
        if not journal.files:
            journal.end()
        raise UserError(
            f"{job.target.name}: needs {readable_size(need)}, {readable_size(free)} are free",
            "make room, or choose a folder on another disk with --output",
        )


def _report(job: Job, seconds: float) -> None:
    plan, trained, dtype = job.plan, job.trained, job.settings.dtype
    for old, count in plan.recast.items():
        print(f"note: {count} merged tensors are {dtype}; the base has them as {DTYPES[old].name}")
    if isinstance(trained, TrainedAdapters) and trained.settings.quantize is not None:
        print(
            f"note: the adapters were trained on {trained.settings.quantize} weights; they are merged into "
            "the base as it is"
        )
    if trained.no_op:
        print(f"warning: the adapters of step {trained.step} are all zero; the output equals the base")
    print(
        f"merged: {job.target.name} step={trained.step} tensors={plan.merged} kept={plan.copied} "
        f"size={readable_size(plan.size)} seconds={seconds:.1f}"
        + (f" adapter={job.adapter.name}" if job.adapter else "")
    )


def readable_size(size: int) -> str:
    """Bytes as "62.5GB" or "4.1MB"."""
    return f"{size / 1e9:.1f}GB" if size >= 10**9 else f"{size / 1e6:.1f}MB"


def under(working: str, path: str) -> str:
    """A path of the recipe: as it is when absolute or an address, else below the working folder."""
    if "://" in path or Path(path).expanduser().is_absolute():
        return path
    if "://" in working:
        return f"{working.rstrip('/')}/{path}"
    return str(Path(working).expanduser() / path)


def _files(count: int) -> str:
    return f"{count:,} file{'' if count == 1 else 's'}"


def _entry(data: bytes) -> dict[str, Any]:
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
