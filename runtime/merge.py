"""Merges what was trained into its base checkpoint, and writes adapters as a PEFT adapter.

W[out, in] += scale * (B[out, rank] @ A[rank, in]), in float32, cast once; after full fine-tuning the
trained tensors take the base's place. The output has the base's files, tensor names and order, metadata,
index and side files; tensors that were not trained are the base's byte for byte. One tensor is worked on
at a time, in blocks of rows.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime.checkpoint import DTYPES, INDEX, BaseCheckpoint, Header, locate_model
from runtime.errors import UserError, guarded
from runtime.full import Replacement, TrainedWeights
from runtime.output import check_vacant, whole_folder
from runtime.peft_export import write_adapter
from runtime.progress import Progress
from runtime.safetensors_writer import CODES, TensorFile, encode_header
from runtime.settings import ModelSettings
from runtime.trained import LATEST, LOCK, Delta, TrainedAdapters, load_trained

NOTE = "merge.json"
"""What the merged folder was made of."""
CHAT_TEMPLATE = "chat_template.jinja"
"""Where transformers and vLLM look for a template first, before tokenizer_config.json."""
BLOCK_ELEMENTS = 1 << 24
"""Elements of a weight that are merged at a time: 64 MiB in float32."""
COPY_BYTES = 1 << 26
SPARE_BYTES = 64 << 20
"""Left free on the disk besides the weights, for side files."""

Change = Delta | Replacement
"""What training did to a tensor."""


@dataclass(frozen=True)
class Merged:
    """What a merge wrote.

    Attributes:
        merged, kept: numbers of tensors that training changed, and that are the base's bytes.
        size: bytes of the weights.
        recast: numbers of changed tensors whose element type is not the base's, by its old name.
    """

    merged: int
    kept: int
    size: int
    recast: Mapping[str, int]


def main(
    artifact: Path,
    model: ModelSettings,
    *,
    checkpoint: str,
    output: str,
    dtype: str,
    adapter: bool,
    chat_template: str | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """Runs a generated merge.py; returns its exit status.

    Args:
        artifact: the folder of the script.
        model: the base.
        checkpoint, output: `checkpoint.directory` and `merge.output` of the recipe; relative ones are
            relative to --output, by default the artifact's folder.
        dtype: of the merged weights, "bfloat16" or "float32".
        adapter: whether the PEFT adapter is written as well, beside the merged folder.
        chat_template: the recipe's own, None where it trained with the tokenizer's. A model is served
            with the template that it was trained with, so it takes the place of the base's.
        argv: arguments, sys.argv's when None.
    """
    arguments = parse_arguments(artifact, argv)
    try:
        return guarded(lambda: run(arguments, model, checkpoint, output, dtype, adapter, chat_template))
    except KeyboardInterrupt:
        print("\ninterrupted: no output was written that is not whole", file=sys.stderr)
        return 130


def parse_arguments(artifact: Path, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The paths and the step; what was trained comes from the checkpoint's record."""
    parser = argparse.ArgumentParser(
        prog="merge.py",
        description="Merges what a checkpoint was trained to into the base model's safetensors.",
        allow_abbrev=False,
    )
    parser.add_argument("--checkpoint", metavar="DIR", help="folder of the run's checkpoints, local or gs://")
    parser.add_argument(
        "--step", default=LATEST, metavar="N", help="latest (default), best (lowest eval loss), or a step"
    )
    parser.add_argument("--model", metavar="DIR", help="folder of the base checkpoint")
    parser.add_argument(
        "--output",
        type=Path,
        default=artifact,
        metavar="DIR",
        help="working folder, as given to train.py (default: this script's folder)",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="then compare the merged model's logits with those of what was trained",
    )
    return parser.parse_args(argv)


def run(
    arguments: argparse.Namespace,
    model: ModelSettings,
    checkpoint: str,
    output: str,
    dtype: str,
    adapter: bool,
    chat_template: str | None = None,
) -> int:
    """Merges, exports and, when asked, verifies.

    Raises:
        UserError: when an input is missing or does not fit, or the output is there already.
    """
    started = time.monotonic()
    if not arguments.verify:
        # Adapters are read on the host: do not occupy the TPU, nor need one.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    target = _local(arguments.output, output)
    adapter_target = target.with_name(f"{target.name}-adapter")
    directory = arguments.checkpoint or _under(arguments.output, checkpoint)
    base = BaseCheckpoint.open(locate_model(model, arguments.model))
    base.verify()
    trained = load_trained(directory, arguments.step, base)
    note: dict[str, Any] = {
        "base": model.id,
        "revision": model.revision,
        "step": trained.step,
        "dtype": dtype,
    }
    if isinstance(trained, TrainedAdapters):
        note |= {"rank": trained.settings.rank, "alpha": trained.settings.alpha}
    elif adapter:
        raise UserError(
            f"{directory}: the run trained all weights: it has no LoRA that a PEFT adapter could hold",
            "set merge.adapter to false",
        )
    if arguments.verify and _is_merge_of(target, note, trained):
        print(f"{target}: holds this merge already")
    else:
        for folder in (target, *([adapter_target] if adapter else [])):
            check_vacant(folder)
        changes = trained.changes(base)
        _check_space(target, base, changes, dtype)
        try:
            with whole_folder(target) as partial:
                result = merge_checkpoint(base, changes, partial, dtype)
                _write_json(partial / NOTE, {**note, "tensors": result.merged})
                (partial / LOCK).write_bytes(trained.lock)
                if chat_template is not None:
                    (partial / CHAT_TEMPLATE).write_text(chat_template, encoding="utf-8")
                if adapter and isinstance(trained, TrainedAdapters):
                    with whole_folder(adapter_target) as adapter_partial:
                        write_adapter(adapter_partial, base, model, trained.settings, trained.deltas())
                        (adapter_partial / LOCK).write_bytes(trained.lock)
        except OSError as error:
            raise UserError(f"{target}: cannot be written: {error.strerror or error}") from error
        for old, count in result.recast.items():
            print(f"note: {count} merged tensors are {dtype}; the base has them as {DTYPES[old].name}")
        if isinstance(trained, TrainedAdapters) and trained.settings.quantize is not None:
            print(
                f"note: the adapters were trained on {trained.settings.quantize} weights; they are merged "
                "into the base as it is"
            )
        if trained.no_op:
            print(f"warning: the adapters of step {trained.step} are all zero; the output equals the base")
        print(
            f"merged: {target} step={trained.step} tensors={result.merged} kept={result.kept} "
            f"size={readable_size(result.size)} seconds={time.monotonic() - started:.1f}"
            + (f" adapter={adapter_target}" if adapter else "")
        )
    if arguments.verify:
        from runtime.verify import verify_merge

        return verify_merge(base, trained, target, model, dtype)
    return 0


def merge_checkpoint(
    base: BaseCheckpoint, changes: Mapping[str, Change], folder: Path, dtype: str | None = None
) -> Merged:
    """Writes the base with its changes into an empty folder.

    Args:
        changes: by the full name of the tensor.
        dtype: of the tensors that change; their own in the base when None.

    Raises:
        UserError: when a change has no tensor, or one of another shape.
    """
    check_changes(base, changes)
    remaining = dict(changes)
    size = 0
    recast: dict[str, int] = {}
    with Progress("merging", base.total_bytes) as progress:
        for file, header in base.headers.items():
            raw, sizes = output_header(header, changes, dtype)
            with TensorFile(folder / file, raw) as sink:
                for name, tensor in header.tensors.items():
                    change = remaining.pop(name, None)
                    if change is None:
                        _copy(base, name, sink)
                    else:
                        code = code_of(dtype) if dtype else tensor.dtype
                        if code != tensor.dtype:
                            recast[tensor.dtype] = recast.get(tensor.dtype, 0) + 1
                        for block in changed_blocks(base.read(name), change, DTYPES[code]):
                            sink.write(block)
                    base.release(name)
                    progress.advance(tensor.end - tensor.start)
            written = (folder / file).stat().st_size
            if written != 8 + len(raw) + sum(sizes):
                raise AssertionError(f"{file}: {written} bytes written, {8 + len(raw) + sum(sizes)} expected")
            size += written
    if remaining:
        raise AssertionError(f"changes without a tensor: {sorted(remaining)}")
    _write_index(base, folder, changes, dtype)
    for name in base.side_files:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(base.directory / name, folder / name)
    return Merged(len(changes), len(base.tensors) - len(changes), size, recast)


def changed_blocks(weight: np.ndarray, change: Change, dtype: np.dtype) -> Iterator[np.ndarray]:
    """A changed tensor, in blocks of rows.

    Args:
        weight: the base's.
    """
    if isinstance(change, Delta):
        yield from merged_blocks(weight, change, dtype)
        return
    trained = change.read()
    rows = max(1, BLOCK_ELEMENTS // max(1, trained.size // max(1, len(trained))))
    for start in range(0, len(trained), rows):
        yield np.ascontiguousarray(trained[start : start + rows].astype(dtype, copy=False))


def merged_blocks(weight: np.ndarray, delta: Delta, dtype: np.dtype) -> Iterator[np.ndarray]:
    """weight + scale * b @ a, computed in float32 and cast once, in blocks of rows."""
    a = delta.a.astype(np.float32, copy=False)
    b = delta.b.astype(np.float32, copy=False) * np.float32(delta.scale)
    rows = max(1, BLOCK_ELEMENTS // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        block = b[start : start + rows] @ a
        block += weight[start : start + rows].astype(np.float32, copy=False)
        yield block.astype(dtype, copy=False)


def check_changes(base: BaseCheckpoint, changes: Mapping[str, Change]) -> None:
    """Checks that each change has its tensor in the base.

    Raises:
        UserError: naming the first that has not.
    """
    for name, change in changes.items():
        tensor = base.tensors.get(name)
        if tensor is None:
            raise UserError(f"{base.directory}: no {name}, which an adapter was trained for")
        if tensor.shape != change.shape:
            raise UserError(
                f"{base.directory / tensor.file}: {name} has shape {list(tensor.shape)}; "
                f"its adapter was trained for {list(change.shape)}"
            )


def output_header(
    header: Header, changed: Mapping[str, Change], dtype: str | None
) -> tuple[bytes, list[int]]:
    """A file's header in the output, and the size of each tensor; the base's own where no type changes."""
    entries = {}
    for name, tensor in header.tensors.items():
        code, size = tensor.dtype, tensor.end - tensor.start
        if name in changed and dtype and code_of(dtype) != code:
            size = size // DTYPES[code].itemsize * DTYPES[code_of(dtype)].itemsize
            code = code_of(dtype)
        entries[name] = (code, tensor.shape, size)
    sizes = [size for _, _, size in entries.values()]
    if all(entries[name][0] == tensor.dtype for name, tensor in header.tensors.items()):
        return header.raw, sizes
    return encode_header(entries, header.metadata), sizes


def code_of(dtype: str) -> str:
    """Safetensors' name of an element type: "BF16" for "bfloat16"."""
    return next(code for kind, code in CODES.items() if kind.name == dtype)


def readable_size(size: int) -> str:
    """Bytes as "62.5GB" or "4.1MB"."""
    return f"{size / 1e9:.1f}GB" if size >= 10**9 else f"{size / 1e6:.1f}MB"


def _copy(base: BaseCheckpoint, name: str, sink: TensorFile) -> None:
    data = base.bytes_of(name)
    for start in range(0, len(data), COPY_BYTES):
        sink.write(data[start : start + COPY_BYTES])


def _write_index(
    base: BaseCheckpoint, folder: Path, changed: Mapping[str, Change], dtype: str | None
) -> None:
    if base.index is None:
        return
    shutil.copyfile(base.directory / base.index, folder / base.index)
    sizes = [sum(output_header(header, changed, dtype)[1]) for header in base.headers.values()]
    data = sum(header.size - header.data_start for header in base.headers.values())
    if sum(sizes) == data:
        return
    index = json.loads((folder / INDEX).read_text())
    index.setdefault("metadata", {})["total_size"] = sum(sizes)
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _check_space(target: Path, base: BaseCheckpoint, changed: Mapping[str, Change], dtype: str) -> None:
    deltas = [change for change in changed.values() if isinstance(change, Delta)]
    need = SPARE_BYTES + sum(delta.a.nbytes + delta.b.nbytes for delta in deltas)
    need += sum(sum(output_header(header, changed, dtype)[1]) for header in base.headers.values())
    folder = target.parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < need:
        raise UserError(
            f"{target}: needs {readable_size(need)}, {readable_size(free)} are free",
            "make room, or choose a folder on another disk with --output",
        )


def _is_merge_of(target: Path, note: Mapping[str, Any], trained: TrainedAdapters | TrainedWeights) -> bool:
    """Whether a folder holds the output of this very merge."""
    try:
        found = json.loads((target / NOTE).read_text())
        lock = (target / LOCK).read_bytes()
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and lock == trained.lock and note.items() <= found.items()


def _under(working: Path, path: str) -> str:
    """A path of the recipe: as it is when absolute or an address, else below the working folder."""
    return path if "://" in path else str(working / Path(path).expanduser())


def _local(working: Path, path: str) -> Path:
    if "://" in path:
        raise UserError(
            f"{path}: the merge writes to a local disk",
            "set merge.output to a folder, and copy it from there",
        )
    return Path(_under(working, path))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
