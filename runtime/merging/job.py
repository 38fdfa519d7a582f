"""Run one merge: its inputs, the identity by which a second run recognizes it, and its folders, which become
loadable only at the end."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from etils import epath

from ..addresses import open_address
from ..checkpoints import manifest
from ..checkpoints.record import LOCK
from ..checkpoints.saved_steps import ITEM
from ..checkpoints.trained_weights import Delta, TrainedAdapters, TrainedWeights
from ..data.stops import GENERATION, files_of, new_stops, with_stops, with_stops_for_adapter
from ..data.tokenizer import with_tokens
from ..errors import Spoiled, UserError
from ..model.reach import Reach, reach
from ..peft.exporting import adapter_config, config_bytes, write_weights
from ..peft.peft_names import ADAPTER_CONFIG, WEIGHTS, tied_embedding
from ..progress import readable_size
from ..settings import ModelSettings
from ..weights.checkpoint import CONFIG, INDEX, HFCheckpoint
from ..weights.safetensors_files import DTYPES
from .base_hashes import compared
from .file_plan import MergePlan
from .journal import JOURNAL, RECORD, Files, Journal, begin, encoded, examine, finished
from .model_card import adapter_card, model_card
from .output_folder import OutputFolder, RemoteFolder, refused
from .tokenizer_files import tokenizer_of, with_own
from .writer import Sink, write_shards

if TYPE_CHECKING:
    from .compressed_tensors import Quantization

CARD = "README.md"
NOT_CARRIED = (CARD, CONFIG, RECORD, JOURNAL, LOCK, "SHA256SUMS")
"""Side files of a base that are not copied."""
SPARE_BYTES = 64 << 20
"""Bytes to leave free on the disk in addition to the weights, for side files."""

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


def identity(
    base: HFCheckpoint,
    directory: str,
    trained: Trained,
    settings: MergeSettings,
    ends: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return everything that the output depends on, under names for messages.

    Args:
        directory: the run's checkpoint directory.
        ends: the tokens that end an answer, by the run's record; None if it has none.
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
        "ends": None if ends is None else list(ends),
    }


def base_digest(base: HFCheckpoint) -> str:
    """Return a SHA-256 of config.json, each file's name, size and header, and a small part of the weights.

    The weights are included because two models of one architecture may differ only in them.
    """
    digest = hashlib.sha256(base.side_file(CONFIG))
    per_file = -(-SAMPLES // len(base.headers))
    for file, header in base.headers.items():
        digest.update(f"{file} {header.size}\n".encode())
        digest.update(header.raw)
        for number in range(per_file):
            start = header.data_start + (header.size - header.data_start) * (2 * number + 1) // (2 * per_file)
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


def output_folder(address: str | Path) -> OutputFolder:
    """Return the folder of a path or of an fsspec address.

    Raises:
        UserError: when no file system is known for the address, its package is missing, or access is refused.
    """
    opened = open_address(address)
    if isinstance(opened, Path):
        return OutputFolder(opened)
    return RemoteFolder(str(address), *opened)


@dataclass(frozen=True)
class MergeJob:
    """The inputs and the output of a merge.

    Attributes:
        base, model: the base checkpoint, and the recipe's `model` section.
        trained: what was trained.
        settings: the merge settings.
        plan: the plan of the weights.
        quantization: the plan's quantization.
        identity: the merge's identity, see `identity`.
        target: folder of the merged weights.
        adapter: folder of the PEFT adapter, or None.
        tokenizer_files: files of the tokenizer and the chat template that the run used instead of the base's.
        ends: the tokens with which training ends an answer, None if the run did not record them.
        losses: losses of the step, as logged by the run.
    """

    base: HFCheckpoint
    model: ModelSettings
    trained: Trained
    settings: MergeSettings
    plan: MergePlan
    quantization: Quantization | None
    identity: Mapping[str, Any]
    target: OutputFolder
    adapter: OutputFolder | None
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)
    ends: Sequence[int] | None = None


def merge(job: MergeJob) -> Mapping[str, Any]:
    """Write the folders that do not exist yet, and print them; return the record.

    Raises:
        UserError: when a folder has other content, or cannot be written.
    """
    started = time.monotonic()
    with job.target.locked():
        record = finished(job.target, job.identity)
        if record is None:
            examine(job.target, job.identity, _planned(job))
        # Both folders are checked before the first byte is written: refusing one hours later is too late.
        with job.adapter.locked() if job.adapter else nullcontext():
            adapter = job.adapter
            if adapter is not None and finished(adapter, job.identity) is not None:
                adapter = None
            if adapter is not None:
                examine(adapter, job.identity, _adapter_files(job))
            if record is not None and adapter is None:
                print(f"{job.target.name}: already holds this merge")
                return record
            if record is None:
                record = _write(job, adapter)
            elif adapter is not None:
                _write_adapter(job, adapter)
    _report(job, time.monotonic() - started)
    return record


def _planned(job: MergeJob) -> set[str]:
    """Return the names of all files that a merge writes into its folder."""
    names = {shard.file for shard in job.plan.shards} | {CARD, CONFIG, LOCK, RECORD}
    names |= {name for name in job.base.side_files if name not in NOT_CARRIED}
    names |= {INDEX} if job.plan.index is not None else set()
    names |= {GENERATION} if _stops(job) is not None else set()
    return names | job.tokenizer_files.keys()


def _write(job: MergeJob, adapter: OutputFolder | None) -> dict[str, Any]:
    """Write the folder, and the adapter's folder if it does not exist yet."""
    journal = begin(job.target, job.identity, _planned(job))
    _check_space(job, journal)
    try:
        with compared(job.base):
            write_shards(job.plan, job.base, journal, job.quantization)
    except Spoiled:
        journal.discard(_planned(job))
        raise
    except OSError as error:
        reason = refused(job.target.name, "written", error)
        state = f"{len(journal.files)} of {len(job.plan.shards)} weight files are complete"
        raise UserError(f"{reason.message}; {state}", reason.help) from error
    if adapter is not None:
        _write_adapter(job, adapter)
    return _write_small_files(job, journal)


def _write_small_files(job: MergeJob, journal: Journal) -> dict[str, Any]:
    """Write everything except the weights; the files that make the folder loadable come last."""
    last = {CONFIG: job.base.config_file()}
    if job.quantization is not None:
        config: dict[str, Any] = json.loads(last[CONFIG])
        names = {piece.name for piece in job.plan.pieces if piece.quantized}
        config["quantization_config"] = job.quantization.config(job.base, names)
        last = {CONFIG: (json.dumps(config, indent=2) + "\n").encode()}
    if job.plan.index is not None:
        last[INDEX] = job.plan.index
    small = {name: job.base.side_file(name) for name in job.base.side_files if name not in NOT_CARRIED}
    if tokens := _new_tokens(job):
        small = with_tokens(small, tokens, job.base.architecture.vocab_size, job.base.name)
    small[LOCK] = job.trained.lock
    if (stops := _stops(job)) is not None:
        small[GENERATION] = stops
    if job.tokenizer_files:
        small = with_own(small, job.tokenizer_files)
    files: Files = {shard.file: journal.files[shard.file] for shard in job.plan.shards}
    files |= {name: _entry(data) for name, data in (small | last).items()}
    record = merge_record(job, files)
    small[CARD] = model_card(
        record, job.trained.record, _base_card(job.base), job.losses, _reach(job)
    ).encode()
    record["files"] = dict(sorted({**files, CARD: _entry(small[CARD])}.items()))
    for name, data in {**small, RECORD: encoded(record), **last}.items():
        journal.folder.write(name, data)
    journal.end()
    return record


def _stops(job: MergeJob) -> bytes | None:
    """Return generation_config.json of the merged model, None if it has none."""
    return with_stops(*files_of(job.base), job.ends or ())


def _next_to_adapter(job: MergeJob) -> dict[str, bytes]:
    """Return the small files that go with an adapter: what its tokenizer, its chat template and its end
    tokens have that the base's do not."""
    stops = with_stops_for_adapter(*files_of(job.base), job.ends or ())
    files = {GENERATION: stops, **job.tokenizer_files}
    if tokens := _new_tokens(job):
        tokenizer = with_tokens(
            tokenizer_of(job.base), tokens, job.base.architecture.vocab_size, job.base.name
        )
        files |= with_own(tokenizer, job.tokenizer_files)
    return files


def _new_tokens(job: MergeJob) -> Mapping[str, str | None]:
    """Return model.add_tokens of the run's recipe."""
    return job.trained.record["recipe"].get("model", {}).get("add_tokens") or {}


def _adapter_files(job: MergeJob) -> tuple[str, ...]:
    """Return the names of all files in a PEFT adapter's folder."""
    return WEIGHTS, CARD, LOCK, RECORD, ADAPTER_CONFIG, *_next_to_adapter(job)


def _write_adapter(job: MergeJob, folder: OutputFolder) -> None:
    assert isinstance(job.trained, TrainedAdapters)
    deltas, whole = job.trained.deltas(), job.trained.saved(job.base)
    journal = begin(folder, job.identity, _adapter_files(job))
    try:
        with folder.create(WEIGHTS) as file, Sink(file) as sink:
            write_weights(sink, job.base, job.trained.settings, deltas, whole)
    except OSError as error:
        raise refused(folder.name, "written", error) from error
    config, tokenizer_files = (
        adapter_config(job.base, job.model, job.trained.settings, deltas),
        _next_to_adapter(job),
    )
    files: Files = {
        WEIGHTS: {"size": sink.size, "sha256": sink.sha256},
        LOCK: _entry(job.trained.lock),
        ADAPTER_CONFIG: _entry(config_bytes(config)),
        **{name: _entry(data) for name, data in tokenizer_files.items()},
    }
    record = merge_record(job, files)
    card = adapter_card(
        record, job.trained.record, config, _base_card(job.base), job.losses, _reach(job)
    ).encode()
    record["files"] = dict(sorted({**files, CARD: _entry(card)}.items()))
    last = {CARD: card, RECORD: encoded(record), ADAPTER_CONFIG: config_bytes(config)}
    for name, data in {LOCK: job.trained.lock, **tokenizer_files, **last}.items():
        folder.write(name, data)
    journal.end()


def _reach(job: MergeJob) -> Reach | None:
    if not isinstance(job.trained, TrainedAdapters):
        return None
    return reach(job.base.family.parameters(job.base.architecture), job.trained.adapters)


def _base_card(base: HFCheckpoint) -> str | None:
    if CARD not in base.side_files:
        return None
    return base.side_file(CARD).decode("utf-8", "replace")


def needed(job: MergeJob, written: Files | None = None) -> int:
    """Return the number of bytes that a merge still writes, plus a reserve."""
    rest = sum(shard.size for shard in job.plan.shards if shard.file not in (written or {}))
    return SPARE_BYTES + rest + (adapter_bytes(job) if job.adapter else 0)


def adapter_bytes(job: MergeJob) -> int:
    deltas = (piece.change for piece in job.plan.pieces if isinstance(piece.change, Delta))
    parts = [part for d in deltas for part in (d.a, d.b, d.magnitude) if part is not None]
    size = sum(part.nbytes for part in parts)
    if isinstance(job.trained, TrainedAdapters):
        tied = tied_embedding(job.base, job.trained.settings)
        for parameter in job.trained.parameters:
            size += job.trained.read(parameter.path).nbytes * (2 if tied in parameter.sources else 1)
    return size


def _check_space(job: MergeJob, journal: Journal) -> None:
    need, free = needed(job, journal.files), job.target.free()
    if free is not None and free < need:
        if not journal.files:
            journal.end()
        raise UserError(
            f"{job.target.name}: needs {readable_size(need)}, {readable_size(free)} are free",
            "make room, or choose a folder on another disk with --output",
        )


def _report(job: MergeJob, seconds: float) -> None:
    plan, trained, dtype = job.plan, job.trained, job.settings.dtype
    if job.ends is None:
        print(f"note: the run did not record what ends an answer: {GENERATION} is the base's")
    elif new := new_stops(*files_of(job.base), job.ends):
        tokens = ", ".join(map(str, new))
        print(
            f"note: training ends an answer with token {tokens}, which {GENERATION} has as an end token too"
        )
    if dequantized := job.base.dequantized:
        print(
            f"note: {len(dequantized)} tensors, which the base has in "
            f"{job.base.tensors[dequantized[0]].form}, are written in bfloat16; config.json has no "
            "quantization_config"
        )
    for old, count in plan.recast.items():
        print(f"note: {count} merged tensors are {dtype}; the base has them as {DTYPES[old].name}")
    if (stored := trained.record["recipe"].get("model", {}).get("quantization")) is not None:
        print(f"note: the adapters were trained on {stored} weights; they are merged into the base as it is")
    tensors = job.base.tensors.items()
    unseen = [f"{name} ({tensor.dtype})" for name, tensor in tensors if tensor.dtype not in DTYPES]
    if unseen:
        print(f"note: not checked for values that are not finite: {', '.join(unseen)}")
    if trained.no_op:
        print(f"warning: the adapters of step {trained.step} are all zero; the output equals the base")
    print(
        f"merged: {job.target.name} step={trained.step} tensors={plan.merged} kept={plan.copied} "
        f"size={readable_size(plan.size)} seconds={seconds:.1f}"
        + (f" adapter={job.adapter.name}" if job.adapter else "")
    )


def _entry(data: bytes) -> dict[str, Any]:
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


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
    }
