"""Verify a merge against the trained model: `merge.py --verify`. This needs no torch.

It hashes the files first. Then it compares tensors with an independent computation (`tensor_samples`). If
memory allows, it compares logits in float32 on a few fixed rows of tokens, in train.py's decoder or, for
models without a family of their own, in transformers. Four models are compared: (1) what was trained: the
base with its adapters, or all weights of a run without LoRA; (2) the base with the merge rule applied in
memory, not rounded: tests the rule; (3) the same, rounded: shows the effect of rounding; (4) the merged
checkpoint from its files, which will be served and has to equal (3). Adapters that were trained on quantized
weights are merged into, and compared on, the weights before quantization.
"""

from __future__ import annotations

import functools
import gc
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx

from ..checkpoints.trained_weights import TrainedAdapters, TrainedWeights
from ..errors import UserError
from ..model.loading import Built, build, variables_of
from ..model.partition_rules import data_parallel
from ..model.sharding import named, shard_rows, start_mesh
from ..process_memory import available_memory
from ..progress import readable_size
from ..settings import MeshSettings, ModelSettings
from ..weights.checkpoint import HFCheckpoint
from .arithmetic import in_memory
from .merged_files import UNUSABLE, check_files
from .tensor_samples import check_tensors

if TYPE_CHECKING:
    from jax.sharding import Mesh


LENGTHS = (37, 23, 13, 5)
"""Number of tokens of each compared row."""

RULE_TOLERANCE = 3e-5
"""Allowed difference without rounding, as a share of the largest logit (of at least 1). Measured: 3e-7 to
9e-6 for the tests' tiny models of every family."""

SPACING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 0.0}
"""Distance between neighboring numbers of a type, relative to their size."""

AMPLIFICATION = 32.0
"""Models differ in how strongly they react to small changes of their weights, which the effect of rounding
the same weights shows. Measured for tiny models of six families and 2 to 24 layers: the difference without
rounding was 2 to 22 times the effect of rounding to bfloat16, scaled to float32's spacing."""

FLIPPED = 0.1
"""Allowed difference of the files from the merge in memory, as a share of rounding's effect. On one machine
it is zero; another machine's float32 product may round one element in ten thousand differently."""

SPARE = 1 << 30
"""Bytes of memory for the interpreter, the compiler and a layer's intermediate results."""


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
        f"tensors: all {sampled.trained:,} trained ones are right in "
        f"{sampled.elements:,} elements: largest difference from float64 {sampled.largest:.1e}, all within "
        f"one rounding, {sampled.off:,} not the nearest number; all {sampled.kept:,} others are "
        "the base's"
    )
    if trained.no_op:
        print(f"warning: the adapters of step {trained.step} are all zero: the merged model is the base")
    reason = None
    if record.get("quantization") is not None:
        reason = f"the merged weights are {record['quantization']}"
    else:
        mesh = mesh_of(trained.record)
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
    if base.architecture.vision is not None:
        merged = merged.seeing()
    merged.verify()
    differences = compare(base, trained, merged, model, dtype, mesh)
    tolerances = {
        "rule_tolerance": differences.rule_tolerance,
        "files_tolerance": differences.files_tolerance,
    }
    tell({"logits": asdict(differences) | tolerances})
    return _report(folder, trained, differences)


def _report(folder: Path, trained: TrainedAdapters | TrainedWeights, differences: LogitDifferences) -> int:
    if not differences.rule <= differences.rule_tolerance:
        raise UserError(
            f"{folder}: the merge rule is not what was trained: logits differ by {differences.rule:.1e}, "
            f"allowed are {differences.rule_tolerance:.1e}",
            "do not use the merged checkpoint",
        )
    if not differences.files <= differences.files_tolerance:
        raise UserError(
            f"{folder}: is not what was trained: logits differ by {differences.files:.1e} from those of "
            f"the merge in memory, allowed are {differences.files_tolerance:.1e}",
            UNUSABLE,
        )
    what = "the adapters" if isinstance(trained, TrainedAdapters) else "the trained weights"
    if not trained.no_op and differences.effect <= differences.merged:
        print(
            f"warning: rounding to {differences.dtype} moves logits by {differences.merged:.1e}, {what} by "
            f"{differences.effect:.1e}: little of what was trained is in the merged model"
        )
    elif not trained.no_op and differences.moved == 0:
        raise UserError(f"{folder}: equals the base, although {what} change it", UNUSABLE)
    line = (
        f"verified: max logits difference {differences.rule:.1e} (tolerance {differences.rule_tolerance:.1e})"
    )
    if SPACING[differences.dtype]:
        line += f", rounded to {differences.dtype} {differences.merged:.1e}"
        line += f", files {differences.files:.1e} (tolerance {differences.files_tolerance:.1e})"
    print(f"{line}; {what} change logits by {differences.effect:.1e} of {differences.largest:.1e}")
    return 0


@dataclass(frozen=True)
class LogitDifferences:
    """The largest differences of logits.

    Attributes:
        largest: largest logit of what was trained.
        effect, moved: what was trained, and the merged files, against base.
        rule: the merge rule in memory against what was trained.
        rounding: the merge rule in memory, rounded, against the same unrounded; 0 for float32.
        files: the merged files against the merge rule in memory, rounded.
        merged: the merged files against what was trained.
        dtype: type of the merged tensors.
    """

    largest: float
    effect: float
    rule: float
    rounding: float
    files: float
    merged: float
    moved: float
    dtype: str

    @property
    def rule_tolerance(self) -> float:
        allowed = RULE_TOLERANCE * max(1.0, self.largest)
        if not SPACING[self.dtype]:
            return allowed
        return max(allowed, AMPLIFICATION * self.rounding * 2.0**-24 / SPACING[self.dtype])

    @property
    def files_tolerance(self) -> float:
        return RULE_TOLERANCE * max(1.0, self.largest) + FLIPPED * self.rounding


def logits_bytes(base: HFCheckpoint, trained: TrainedAdapters | TrainedWeights) -> int:
    """Return the memory that comparing logits takes on a CPU, in bytes.

    Models are in memory one at a time, in float32. This counts 4 bytes for each element of the model's arrays
    and of the adapters, twice the largest array, four times the logits of all rows, and SPARE. Measured:
    2.1 GB at 297 M parameters in 18 layers, for which this returns 3.1 GB.
    """
    parameters = [math.prod(p.shape) for p in base.family.parameters(base.architecture)]
    adapters = 0
    if isinstance(trained, TrainedAdapters):
        adapters = sum(array.size for arrays in trained.arrays.values() for array in arrays)
    logits = len(LENGTHS) * max(LENGTHS) * base.architecture.vocab_size
    return 4 * (sum(parameters) + adapters + 2 * max(parameters) + 4 * logits) + SPARE


def compare(
    base: HFCheckpoint,
    trained: TrainedAdapters | TrainedWeights,
    merged: HFCheckpoint,
    model: ModelSettings,
    dtype: str,
    mesh: Mesh,
) -> LogitDifferences:
    """Run the models one after the other, so that only one is in memory at a time."""
    settings = replace(model.unquantized, dtype="float32", attention="dot", remat="none")
    lora = None
    if isinstance(trained, TrainedAdapters):
        lora = replace(trained.settings, dtype="float32")
    rules = [(rule["match"], tuple(rule["spec"])) for rule in trained.record["recipe"]["sharding"]["rules"]]
    rows = token_rows(base.architecture.vocab_size, data_parallel(mesh.shape))

    def of(checkpoint: HFCheckpoint, adapters: bool = False) -> np.ndarray:
        if base.family.tunix:
            built = build(checkpoint, settings, lora if adapters else None, mesh, rules)
            if adapters and isinstance(trained, TrainedAdapters):
                set_adapters(built, trained, mesh)
            elif adapters and not isinstance(trained, TrainedAdapters):
                trained.put(variables_of(built.model))
            out = logits(built, rows, mesh)
            del built
        else:
            from ..backends.torchax.logits import Run
            from ..backends.torchax.logits import logits as computed

            assert isinstance(trained, TrainedAdapters) and lora is not None
            deltas = trained.deltas().items()
            values = {name: (delta.a, delta.b) for name, delta in deltas} if adapters else None
            out = computed(Run(settings, lora, mesh, rules), checkpoint, rows, values)
        gc.collect()  # a model's modules refer to each other, and hold its arrays
        return out

    with jax.default_matmul_precision("highest"):
        adapted, unadapted = of(base, adapters=True), of(base)
        ruled = of(in_memory(base, trained.changes(base), "float32"))
        rounded = of(in_memory(base, trained.changes(base), dtype)) if SPACING[dtype] else ruled
        read = of(merged)
    return LogitDifferences(
        largest=float(np.abs(adapted).max()),
        effect=_difference(adapted, unadapted),
        rule=_difference(adapted, ruled),
        rounding=_difference(ruled, rounded),
        files=_difference(rounded, read),
        merged=_difference(adapted, read),
        moved=_difference(unadapted, read),
        dtype=dtype,
    )


def mesh_of(record: Mapping[str, Any]) -> Mesh:
    """Return the run's own mesh if its TPU is present, otherwise one CPU device. A mesh of several hosts
    would wait for the other hosts."""
    section = record["recipe"]["mesh"]
    axes = dict(section["axes"])
    hosts = record.get("hosts", 1)
    if hosts > 1:
        print(f"note: verifying on the CPU: the run's mesh spans {hosts} hosts", file=sys.stderr)
    elif not (section.get("accelerator") or "").startswith("cpu"):
        try:
            return start_mesh(MeshSettings("tpu", math.prod(axes.values()), axes))
        except UserError as error:
            print(f"note: verifying on the CPU: {error.message}", file=sys.stderr)
    return start_mesh(MeshSettings("cpu", 1, {axis: 1 for axis in axes}))


def token_rows(vocabulary: int, multiple: int) -> dict[str, np.ndarray]:
    """Return fixed rows of different lengths, right-padded: tokens, positions, segment_ids, all int32[B, T].

    Args:
        multiple: the number of rows is a multiple of this.
    """
    count = math.lcm(len(LENGTHS), multiple)
    lengths = np.array([LENGTHS[i % len(LENGTHS)] for i in range(count)])[:, None]
    places = np.broadcast_to(np.arange(max(LENGTHS)), (count, max(LENGTHS)))
    tokens = np.random.default_rng(0).integers(0, vocabulary, places.shape)
    valid = places < lengths
    return {
        "tokens": np.where(valid, tokens, 0).astype(np.int32),
        "positions": np.where(valid, places, 0).astype(np.int32),
        "segment_ids": valid.astype(np.int32),
    }


def logits(built: Built, rows: Mapping[str, np.ndarray], mesh: Mesh) -> np.ndarray:
    """Return float32 logits of all tokens except padding: [tokens, vocabulary]."""
    structure, state = nnx.split(built.model)
    with mesh:
        out = _logits()(built.forward, Structure(structure), state, **shard_rows(dict(rows), mesh))
    return np.asarray(out, np.float32)[rows["segment_ids"] > 0]


@functools.cache
def _logits() -> Callable[..., Any]:
    """Run a model's forward pass, compiled once for all models of the same structure.

    nnx.jit would return the whole model, which is a second copy of it.
    """

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def logits(
        forward: Any, structure: Any, state: Any, *, tokens: Any, positions: Any, segment_ids: Any
    ) -> Any:
        return forward.logits(nnx.merge(structure.definition, state), tokens, positions, segment_ids)

    return logits


@dataclass(frozen=True)
class Structure:
    """A model without its arrays, as a key of JAX's cache, hashed by its type alone."""

    definition: Any

    def __hash__(self) -> int:
        return hash(type(self))


def set_adapters(built: Built, trained: TrainedAdapters, mesh: Mesh) -> None:
    """Give a model all trained adapters, in its own dtype and sharding."""
    variables = {
        path: parameter
        for path, parameter in variables_of(built.model).items()
        if isinstance(parameter, nnx.LoRAParam)
    }
    values = {p.path: (p.spec, trained.read(p.path)) for p in built.whole}
    for adapter in built.adapters:
        arrays = trained.arrays[adapter.target.weight]
        values |= {path: (spec, array) for (path, _, spec), array in zip(adapter.arrays, arrays, strict=True)}
    for path, (spec, value) in values.items():
        variable = variables.pop(path)
        array = value.astype(variable.get_raw_value().dtype)
        variable.set_raw_value(jax.device_put(array, named(mesh, spec)))
    if variables:
        raise AssertionError(f"adapters without a value: {sorted(variables)}")


def _difference(left: Sequence[float] | np.ndarray, right: Sequence[float] | np.ndarray) -> float:
    return float(np.abs(np.asarray(left) - np.asarray(right)).max())
