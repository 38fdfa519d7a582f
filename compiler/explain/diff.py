"""`recipe diff`: show what changes from one recipe to another, in the run and in the artifact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from recipec.compiler import catalog
from recipec.compiler.artifacts.artifact import IGNORE, LOCK, difference
from recipec.compiler.emitters.emit import emit
from recipec.compiler.explain.explain import leaves, product_types, scales, stored_type, weight_bytes
from recipec.compiler.lowering import libtpu
from recipec.compiler.lowering.run_length import run_length
from recipec.compiler.pages.numbers import gib_number
from recipec.compiler.wording import in_layers, listing, plural, rounded, split_layer
from recipec.runtime.model.partition_rules import TOKENS
from recipec.runtime.settings import OF_A_SOURCE
from recipec.runtime.training.objectives import settings_of
from recipec.spec.core_schema import flow
from recipec.spec.key_paths import join

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program
    from recipec.spec.language.train import LocalCheckpoint, Train


ONLY_READ = {IGNORE, "README.md", "recipe.yaml", LOCK}
"""Files of an artifact that say what the run is, and that it does not run."""


def diff(before: Program, after: Program, artifact: bool = False) -> str:
    """Return the command's output: the changes in words, each changed value, and the changed files.

    Args:
        artifact: whether to show the changed lines of these files.
    """
    values = list(_values(before, after))
    change = words(before, after)
    patch = _files(before, after, artifact)
    if not values and not patch:
        return "nothing changes\n"
    out = []
    if change:
        out += ["In the run:", *(f"  - {line}" for line in change), ""]
    elif values and _same_run(before, after):
        out += ["Nothing changes in the run.", ""]
    if values:
        out += ["In the recipe:", *(f"  {line}" for line in values), ""]
    text = "\n".join(out)
    return f"{text}\nIn the artifact:\n{patch}" if patch else text


def words(before: Program, after: Program) -> list[str]:
    """Return what changes in the run, one phrase per change."""
    return [line for describe in RUN for line in describe(before, after)]


def _values(before: Program, after: Program) -> Iterator[str]:
    old, new = dict(leaves(before.recipe)), dict(leaves(after.recipe))
    for path in dict.fromkeys([*old, *new]):
        if path in old and path in new:
            if old[path] != new[path]:
                yield f"{join(path)}: {flow(old[path])} -> {flow(new[path])}"
        elif path in new:
            if not any(path[:end] in old for end in range(1, len(path))) or new[path] is not None:
                yield f"{join(path)}: (none) -> {flow(new[path])}"
        elif old[path] is not None:
            yield f"{join(path)}: {flow(old[path])} -> (none)"


def _files(before: Program, after: Program, lines: bool) -> str:
    """Return the changed files, one a line, or with their lines. The lock has only digests and the values
    above."""
    old, new = emit(before), emit(after)
    paths = [path for path in sorted({*old, *new}) if path != LOCK and old.get(path) != new.get(path)]
    if lines:
        return "".join(
            difference(old.get(path), new.get(path), f"{before.name}/{path}", f"{after.name}/{path}")
            for path in paths
        )
    states = {(False, True): "new", (True, False): "removed", (True, True): "changed"}
    listed = [f"  {path}: {states[path in old, path in new]}\n" for path in paths]
    return "".join([*listed, "  (--artifact shows their lines)\n"] if listed else [])


def _same_run(before: Program, after: Program) -> bool:
    """Return whether the scripts differ in nothing but the recipe's name."""
    named = replace(after, recipe=after.recipe.model_copy(update={"name": before.name}))
    old, new = emit(before), emit(named)
    return {path for path in old | new if old.get(path) != new.get(path)} <= ONLY_READ


def _changed(
    words: str, old: Any, new: Any, *, end: str = "", show: Callable[[Any], Any] = str
) -> Iterator[str]:
    """Yield a phrase with two values, if they differ."""
    if old != new:
        yield f"{words} {show(old)} -> {show(new)}{end}"


def _model(a: Program, b: Program) -> Iterator[str]:
    old, new = a.recipe.model, b.recipe.model
    yield from _changed("another model:", old.id, new.id, show=catalog.title)
    if a.architecture != b.architecture:
        yield f"base parameters {a.base_parameters:,} -> {b.base_parameters:,}"
    yield from _changed("base weights and computation in", old.dtype, new.dtype)
    yield from _changed("attention", old.attention, new.attention, end=": another kernel")
    blocks = (model.attention_block or "the accelerator's own" for model in (old, new))
    yield from _changed("blocks of attention's kernel of", *blocks, end=" tokens at the most")
    yield from _changed("tokenizer", old.tokenizer or "its own", new.tokenizer or "its own")


def _mesh(a: Program, b: Program) -> Iterator[str]:
    yield from _changed(
        "trained on", a.accelerator, b.accelerator, show=lambda accelerator: accelerator.describe()
    )
    yield from _changed("data-parallel devices (fsdp)", a.data_parallel, b.data_parallel)
    for axis, what in (("tp", "heads and features"), (TOKENS, "the tokens of a row")):
        old, new = (program.recipe.mesh.axes.get(axis, 1) for program in (a, b))
        if old != new:
            yield f"{what} are split over {plural(old, 'device')} ({axis}) -> {new}"
    sizes = (gib_number(weight_bytes(program)) for program in (a, b))
    yield from _changed("base weights on each device", *sizes, end=" GiB")
    if a.architecture == b.architecture:
        specs = {p.path: p.spec for p in a.parameters}
        moved = [p.path for p in b.parameters if p.spec != specs[p.path]]
        if moved:
            kinds = dict.fromkeys(split_layer(path)[0].replace("{}", "*") for path in moved)
            yield f"{plural(len(moved), 'parameter')} sharded another way: {', '.join(kinds)}"


def _lora(a: Program, b: Program) -> Iterator[str]:
    if (a.lora is None) != (b.lora is None):
        whole, adapters = "the model's own weights", "adapters (LoRA)"
        yield f"trained: {whole} -> {adapters}" if a.lora is None else f"trained: {adapters} -> {whole}"
    if a.lora is None or b.lora is None or a.architecture != b.architecture:
        return
    if a.trainable_parameters != b.trainable_parameters:
        factor = b.trainable_parameters / a.trainable_parameters
        yield f"trained parameters {a.trainable_parameters:,} -> {b.trainable_parameters:,} ({factor:.3g}x)"
    yield from _changed("the adapters'", scales(a), scales(b))
    before, after = (_projections(program) for program in (a, b))
    towers = [{adapter.name for adapter in program.tower_adapters} for program in (a, b)]
    if towers[0] != towers[1]:
        yield f"adapters in the vision tower and its projector: {len(towers[0]):,} -> {len(towers[1]):,}"
    for name in dict.fromkeys([*before, *after]):
        gained = sorted(set(after.get(name, ())) - set(before.get(name, ())))
        lost = sorted(set(before.get(name, ())) - set(after.get(name, ())))
        if gained:
            yield f"{name} gains an adapter in {in_layers(b.architecture.layer_types, gained)}"
        if lost:
            yield f"{name} loses its adapter in {in_layers(a.architecture.layer_types, lost)}"
    for key, words in (
        ("modules_to_save", "trained whole"),
        ("trainable_tokens", "trained rows of the embedding:"),
        ("dropout", "dropout on the adapters' inputs"),
        ("kind", "adapters are"),
        ("init", "adapters start as"),
        ("start_from", "adapters start from"),
        ("loraplus_lr_ratio", "B's learning rate is A's times (LoRA+)"),
        ("dtype", "adapters and optimizer state in"),
        ("kv", "key and value adapters are"),
    ):
        yield from _changed(words, *(_listed(getattr(x.lora, key)) for x in (a, b)))
    if a.recipe.model.quantization != b.recipe.model.quantization:
        yield f"frozen weights stored in {stored_type(a)} -> {stored_type(b)}"
    yield from _changed("products with frozen weights in", product_types(a), product_types(b))


def _projections(program: Program) -> dict[str, list[int]]:
    """Return the layers in which each projection has an adapter."""
    out: dict[str, list[int]] = {}
    for adapter in program.adapters:
        if (layer := adapter.target.layer) is not None:
            out.setdefault(adapter.name.rpartition(".")[2], []).append(layer)
    return out


def _data(a: Program, b: Program) -> Iterator[str]:
    old, new = a.recipe.data, b.recipe.data
    for part in ("train", "eval"):
        first, second = ([s.path for s in getattr(data, part)] for data in (old, new))
        done = "trained" if part == "train" else "evaluated"
        yield from _changed(f"{done} on", first, second, show=flow)
        for name in OF_A_SOURCE:
            values = [[getattr(data.of(s), name) for s in getattr(data, part)] for data in (old, new)]
            if first == second and values[0] != values[1] and getattr(old, name) == getattr(new, name):
                yield f"{name} of {flow(second)}: {flow(values[0])} -> {flow(values[1])}"
        limits = [[s.limit for s in getattr(data, part)] for data in (old, new)]
        if first == second and limits[0] != limits[1]:
            before, after = (listing("all" if n is None else f"{n:,}" for n in counts) for counts in limits)
            yield f"rows of {flow(second)}: {before} -> {after}"
    for name in ("format", "fields", "transform"):
        yield from _changed(f"{name} of the samples:", getattr(old, name), getattr(new, name), show=flow)
    if old.eval_fraction != new.eval_fraction:
        shares = ("none" if n is None else f"{n:.3g}" for n in (old.eval_fraction, new.eval_fraction))
        yield f"held out of the training rows to evaluate on: {' -> '.join(shares)}"
    elif new.eval_fraction is not None and old.eval_seed != new.eval_seed:
        yield "other rows are held out to evaluate on"
    if old.packing != new.packing:
        yield (
            "rows hold several samples (packing)"
            if new.packing
            else "each sample is padded to a row of its own"
        )
    yield from _changed("loss on", old.loss_on, new.loss_on, end=": other tokens are learned")
    reasoning = (data.reasoning or "as the template does" for data in (old, new))
    yield from _changed("the assistant's reasoning:", *reasoning)
    yield from _changed("control tokens in the data are tokenized as", old.special_tokens, new.special_tokens)
    if old.max_length != new.max_length:
        words = {"drop": "left out", "truncate": "cut", "error": "an error", "split": "split"}
        yield f"samples are {words[new.overlong]} above {old.max_length:,} -> {new.max_length:,} tokens"
    elif old.overlong != new.overlong:
        yield f"samples above {new.max_length:,} tokens: {old.overlong} -> {new.overlong}"
    if old.chat_template != new.chat_template:
        yield "another chat template: other tokens are seen"
    yield from _changed("sources drawn by temperature:", old.temperature, new.temperature, show=_or_none)
    yield from _changed("curriculum:", old.curriculum or "none", new.curriculum or "none")
    if old.stream_window != new.stream_window:
        windows = (old.stream_window, new.stream_window)
        before, after = (f"in windows of {window:,}" if window else "read whole" for window in windows)
        yield f"training data {before} -> {after}: another order of samples"
    if old.shuffle_seed != new.shuffle_seed:
        yield "another order of samples"


def _train(a: Program, b: Program) -> Iterator[str]:
    old, new = a.recipe.train, b.recipe.train
    yield from _changed("global batch", old.global_batch_size, new.global_batch_size, end=" rows")
    first, second = (r.train.global_batch_size * r.data.max_length for r in (a.recipe, b.recipe))
    if first != second:
        yield f"room for {first:,} -> {second:,} tokens a step ({second / first:.3g}x)"
    yield from _changed("rows computed at once", a.micro_batch_rows, b.micro_batch_rows)
    yield from _changed("micro-batches a step", a.accumulation_steps, b.accumulation_steps)
    learned = (f"{train.objective}{settings_of(train.model_dump())}" for train in (old, new))
    yield from _changed("learned with", *learned)
    lengths = [run_length(p.recipe, p.source.parent) for p in (a, b)]
    if (old.steps, old.epochs) != (new.steps, new.epochs) or lengths[0].steps != lengths[1].steps:
        yield f"length {_length(a)} -> {_length(b)}"
    yield from _changed("the loss is a mean over", old.loss_normalization, new.loss_normalization)
    balance = (old.router_aux_loss_coef, new.router_aux_loss_coef)
    yield from _changed("the load-balancing loss of experts weighs", *balance, show=_or_none)
    for key, words in (
        ("label_smoothing", "label smoothing"),
        ("z_loss", "weight of the z-loss"),
        ("neftune_noise_alpha", "alpha of the noise on embeddings"),
    ):
        yield from _changed(words, getattr(old, key), getattr(new, key), show=_or_none)
    if old.qat != new.qat:
        yield f"rounded in training: {_rounding(old)} -> {_rounding(new)}"
    rate, other = old.optimizer.learning_rate, new.optimizer.learning_rate
    if rate != other:
        yield f"peak learning rate {rate:g} -> {other:g} ({other / rate:.3g}x)"
    norms = old.optimizer.max_grad_norm, new.optimizer.max_grad_norm
    yield from _changed("gradients clipped to norm", *norms, show=_or_none)
    for key in ("name", "b1", "b2", "eps", "momentum", "weight_decay", "master_weights"):
        values = (getattr(train.optimizer, key) for train in (old, new))
        yield from _changed(f"the optimizer's {key}", *values, show=flow)
    if (old.schedule, old.continue_from) != (new.schedule, new.continue_from):
        yield f"schedule {_schedule(a)} -> {_schedule(b)}"
    yield from _changed("early stopping:", _stopping(old), _stopping(new))
    if old.seed != new.seed:
        yield "other initial adapters and dropout (seed)"
    if old.generations != new.generations:
        yield "other prompts are answered at evaluations (generations)"
    if libtpu.flags(a) != libtpu.flags(b):
        yield "the step is compiled with other flags of libtpu"
    yield from _changed("recomputed in the backward pass:", a.recipe.remat.policy, b.recipe.remat.policy)


def _length(program: Program) -> str:
    length = run_length(program.recipe, program.source.parent)
    if length.exact and length.steps is not None:
        return plural(length.steps, "step")
    epochs = plural(program.recipe.train.epochs or 1, "epoch")
    return epochs if length.steps is None else f"{epochs} ({length.words()})"


def _schedule(program: Program) -> str:
    schedule = program.recipe.train.schedule
    warm = (
        f"{schedule.warmup_ratio:.3g} of the steps"
        if schedule.warmup_ratio is not None
        else schedule.warmup_steps
    )
    end = "" if schedule.name == "constant" else f" to {schedule.min_lr_ratio:g} of the peak"
    first = program.recipe.train.continue_from
    after = "" if first is None else f" after step {first:,}"
    return f"{schedule.name}{end}{after}, warm-up {warm or 'none'}"


def _stopping(train: Train) -> str:
    stopping = train.early_stopping
    return "none" if stopping is None else f"patience {stopping.patience}, min_delta {stopping.min_delta:g}"


def _rounding(train: Train) -> str:
    if train.qat is None:
        return "nothing"
    words = rounded(train.qat) + (", with the head" if train.qat.head else "")
    return f"{words}, from step {train.qat.start_step + 1}" if train.qat.start_step else words


def _local(checkpoint: LocalCheckpoint | None) -> str:
    if checkpoint is None:
        return "none"
    return f"every {plural(checkpoint.every_steps, 'step')} under {checkpoint.directory}"


def _outputs(a: Program, b: Program) -> Iterator[str]:
    old, new = a.recipe.checkpoint, b.recipe.checkpoint
    yield from _changed("checkpoints under", old.directory, new.directory)
    if (old.every_steps, old.keep) != (new.every_steps, new.keep):
        yield (
            f"a checkpoint every {plural(old.every_steps, 'step')}, {old.keep} kept -> every "
            f"{plural(new.every_steps, 'step')}, {new.keep} kept"
        )
    if old.keep_best != new.keep_best:
        yield f"the best checkpoint is {'kept' if new.keep_best else 'no longer kept'}"
    yield from _changed("local checkpoints:", old.local, new.local, show=_local)
    yield from _changed("merged weights in", a.recipe.merge.dtype, b.recipe.merge.dtype)
    quantized = (program.recipe.merge.quantization or "none" for program in (a, b))
    yield from _changed("merged linear weights quantized to", *quantized)


def _serve(a: Program, b: Program) -> Iterator[str]:
    old, new = a.recipe.serve, b.recipe.serve
    if old == new:
        return
    if old is None or new is None:
        yield "no longer served" if new is None else f"served on {new.accelerator}"
        return
    if a.serve_accelerator != b.serve_accelerator and a.serve_accelerator and b.serve_accelerator:
        yield f"served on {a.serve_accelerator.describe()} -> {b.serve_accelerator.describe()}"
    if (old.tensor_parallel_size, old.data_parallel_size) != (
        new.tensor_parallel_size,
        new.data_parallel_size,
    ):
        yield (
            f"{plural(old.data_parallel_size, 'replica')} of {plural(old.tensor_parallel_size, 'device')} -> "
            f"{plural(new.data_parallel_size, 'replica')} of {plural(new.tensor_parallel_size, 'device')}"
        )
    others = [
        k for k in type(old).model_fields if k not in SERVE_DESCRIBED and getattr(old, k) != getattr(new, k)
    ]
    if others:
        yield f"the server's {', '.join(others)} change"


def _listed(value: Any) -> Any:
    return (listing(value) if value else "nothing") if isinstance(value, tuple) else value


def _or_none(value: Any) -> str:
    return "none" if value is None else f"{value:g}"


SERVE_DESCRIBED = ("accelerator", "tensor_parallel_size", "data_parallel_size")

RUN: tuple[Callable[[Program, Program], Iterator[str]], ...] = (
    _model,
    _mesh,
    _lora,
    _data,
    _train,
    _outputs,
    _serve,
)
