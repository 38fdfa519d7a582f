"""`recipe diff`: show what changes from one recipe to another, in the run and in the artifact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from recipec.compiler.artifacts.artifact import difference
from recipec.compiler.emitters.emit import emit
from recipec.compiler.explain.explain import leaves, product_types, scales, stored_type, weight_bytes
from recipec.compiler.lowering import catalog
from recipec.compiler.lowering.run_length import run_length
from recipec.compiler.wording import in_layers, listing, plural, rounded, split_layer
from recipec.runtime.model.partition_rules import TOKENS
from recipec.runtime.training.objectives import settings_of
from recipec.spec.core_schema import flow
from recipec.spec.paths import join

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program
    from recipec.spec.language.train import LocalCheckpoint, Train


def diff(before: Program, after: Program) -> str:
    """Return the command's output: the changes in words, each changed value, and the files' unified diff."""
    values = list(_values(before, after))
    said = words(before, after)
    patch = _files(before, after)
    if not values and not patch:
        return "nothing changes\n"
    out = []
    if said:
        out += ["In the run:", *(f"  - {line}" for line in said), ""]
    elif values:
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


def _files(before: Program, after: Program) -> str:
    old, new = emit(before), emit(after)
    return "".join(
        difference(old.get(path), new.get(path), f"{before.name}/{path}", f"{after.name}/{path}")
        for path in sorted({*old, *new})
    )


def _model(a: Program, b: Program) -> Iterator[str]:
    if a.recipe.model.id != b.recipe.model.id:
        yield f"another model: {catalog.title(a.recipe.model.id)} -> {catalog.title(b.recipe.model.id)}"
    if a.architecture != b.architecture:
        yield f"base parameters {a.base_parameters:,} -> {b.base_parameters:,}"
    if a.recipe.model.dtype != b.recipe.model.dtype:
        yield f"base weights and computation in {a.recipe.model.dtype} -> {b.recipe.model.dtype}"
    if a.recipe.model.attention != b.recipe.model.attention:
        yield f"attention {a.recipe.model.attention} -> {b.recipe.model.attention}: another kernel"
    before, after = a.recipe.model.attention_block, b.recipe.model.attention_block
    if before != after:
        own = "the accelerator's own"
        yield f"blocks of attention's kernel of {before or own} -> {after or own} tokens at the most"
    old, new = a.recipe.model.tokenizer, b.recipe.model.tokenizer
    if old != new:
        yield f"tokenizer {old or 'its own'} -> {new or 'its own'}"


def _mesh(a: Program, b: Program) -> Iterator[str]:
    if a.accelerator != b.accelerator:
        yield f"trained on {a.accelerator.describe()} -> {b.accelerator.describe()}"
    if a.data_parallel != b.data_parallel:
        yield f"data-parallel devices (fsdp) {a.data_parallel} -> {b.data_parallel}"
    old, new = a.recipe.mesh.axes["tp"], b.recipe.mesh.axes["tp"]
    if old != new:
        yield f"heads and features are split over {plural(old, 'device')} (tp) -> {new}"
    old, new = (program.recipe.mesh.axes.get(TOKENS, 1) for program in (a, b))
    if old != new:
        yield f"the tokens of a row are split over {plural(old, 'device')} (cp) -> {new}"
    first, second = weight_bytes(a) / 2**30, weight_bytes(b) / 2**30
    if f"{first:.2f}" != f"{second:.2f}":
        yield f"base weights on each device {first:.2f} -> {second:.2f} GiB"
    if a.architecture == b.architecture:
        specs = {p.path: p.spec for p in a.parameters}
        moved = [p.path for p in b.parameters if p.spec != specs[p.path]]
        if moved:
            kinds = dict.fromkeys(split_layer(path)[0].replace("{}", "*") for path in moved)
            yield f"{plural(len(moved), 'parameter')} sharded another way: {', '.join(kinds)}"


def _lora(a: Program, b: Program) -> Iterator[str]:
    if a.lora is None or b.lora is None or a.architecture != b.architecture:
        return
    if a.trainable_parameters != b.trainable_parameters:
        factor = b.trainable_parameters / a.trainable_parameters
        yield f"trained parameters {a.trainable_parameters:,} -> {b.trainable_parameters:,} ({factor:.3g}x)"
    old, new = scales(a), scales(b)
    if old != new:
        yield f"the adapters' {old} -> {new}"
    before, after = _projections(a), _projections(b)
    for name in dict.fromkeys([*before, *after]):
        gained = sorted(set(after.get(name, ())) - set(before.get(name, ())))
        lost = sorted(set(before.get(name, ())) - set(after.get(name, ())))
        if gained:
            yield f"{name} gains an adapter in {in_layers(b.architecture.layer_types, gained)}"
        if lost:
            yield f"{name} loses its adapter in {in_layers(a.architecture.layer_types, lost)}"
    for key, words in (
        ("train_also", "trained whole"),
        ("train_tokens", "trained rows of the embedding:"),
        ("dropout", "dropout on the adapters' inputs"),
        ("kind", "adapters are"),
        ("init", "adapters start as"),
        ("start_from", "adapters start from"),
        ("plus_ratio", "B's learning rate is A's times (LoRA+)"),
        ("dtype", "adapters and optimizer state in"),
        ("kv", "key and value adapters are"),
    ):
        first, second = (_listed(getattr(x.lora, key)) for x in (a, b))
        if first != second:
            yield f"{words} {first} -> {second}"
    if a.lora.quantize != b.lora.quantize:
        yield f"frozen weights stored in {stored_type(a)} -> {stored_type(b)}"
    if product_types(a) != product_types(b):
        yield f"products with frozen weights in {product_types(a)} -> {product_types(b)}"


def _projections(program: Program) -> dict[str, list[int]]:
    """Return the layers in which each projection has an adapter."""
    out: dict[str, list[int]] = {}
    for adapter in program.adapters:
        for part in adapter.projections:
            out.setdefault(part.name.rpartition(".")[2], []).append(adapter.target.layer)
    return out


def _data(a: Program, b: Program) -> Iterator[str]:
    old, new = a.recipe.data, b.recipe.data
    for part in ("train", "eval"):
        first, second = ([s.path for s in getattr(data, part)] for data in (old, new))
        if first != second:
            yield f"{'trained' if part == 'train' else 'evaluated'} on {flow(first)} -> {flow(second)}"
        for name in ("format", "fields", "transform", "chat_template", "loss_on"):
            own = [[getattr(data.of(s), name) for s in getattr(data, part)] for data in (old, new)]
            if first == second and own[0] != own[1] and getattr(old, name) == getattr(new, name):
                yield f"{name} of {flow(second)}: {flow(own[0])} -> {flow(own[1])}"
        limits = [[s.limit for s in getattr(data, part)] for data in (old, new)]
        if first == second and limits[0] != limits[1]:
            before, after = (listing("all" if n is None else f"{n:,}" for n in each) for each in limits)
            yield f"rows of {flow(second)}: {before} -> {after}"
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
    if old.loss_on != new.loss_on:
        yield f"loss on {old.loss_on} -> {new.loss_on}: other tokens are learned"
    if old.reasoning != new.reasoning:
        plain = "as the template does"
        yield f"the assistant's reasoning: {old.reasoning or plain} -> {new.reasoning or plain}"
    if old.max_length != new.max_length:
        words = {"drop": "left out", "truncate": "cut", "error": "an error"}
        yield f"samples are {words[new.overlong]} above {old.max_length:,} -> {new.max_length:,} tokens"
    elif old.overlong != new.overlong:
        yield f"samples above {new.max_length:,} tokens: {old.overlong} -> {new.overlong}"
    if old.chat_template != new.chat_template:
        yield "another chat template: other tokens are seen"
    if old.temperature != new.temperature:
        yield f"sources drawn by temperature: {_or_none(old.temperature)} -> {_or_none(new.temperature)}"
    if old.curriculum != new.curriculum:
        yield f"curriculum: {old.curriculum or 'none'} -> {new.curriculum or 'none'}"
    if old.stream_window != new.stream_window:
        windows = (old.stream_window, new.stream_window)
        before, after = (f"in windows of {one:,}" if one else "read whole" for one in windows)
        yield f"training data {before} -> {after}: another order of samples"
    if old.shuffle_seed != new.shuffle_seed:
        yield "another order of samples"


def _train(a: Program, b: Program) -> Iterator[str]:
    old, new = a.recipe.train, b.recipe.train
    if old.global_batch_size != new.global_batch_size:
        yield f"global batch {old.global_batch_size} -> {new.global_batch_size} rows"
    first, second = (r.train.global_batch_size * r.data.max_length for r in (a.recipe, b.recipe))
    if first != second:
        yield f"room for {first:,} -> {second:,} tokens a step ({second / first:.3g}x)"
    if a.micro_batch_rows != b.micro_batch_rows:
        yield f"rows computed at once {a.micro_batch_rows} -> {b.micro_batch_rows}"
    if a.accumulation_steps != b.accumulation_steps:
        yield f"micro-batches a step {a.accumulation_steps} -> {b.accumulation_steps}"
    learned = [f"{train.objective}{settings_of(train.model_dump())}" for train in (old, new)]
    if learned[0] != learned[1]:
        yield f"learned with {learned[0]} -> {learned[1]}"
    lengths = [run_length(p.recipe, p.source.parent) for p in (a, b)]
    if (old.steps, old.epochs) != (new.steps, new.epochs) or lengths[0].steps != lengths[1].steps:
        yield f"length {_length(a)} -> {_length(b)}"
    if old.loss_normalization != new.loss_normalization:
        yield f"the loss is a mean over {old.loss_normalization} -> {new.loss_normalization}"
    if old.router_aux_loss_coef != new.router_aux_loss_coef:
        weights = f"{old.router_aux_loss_coef:g} -> {new.router_aux_loss_coef:g}"
        yield f"the load-balancing loss of experts weighs {weights}"
    for key, words in (
        ("label_smoothing", "label smoothing"),
        ("z_loss", "weight of the z-loss"),
        ("neftune_noise_alpha", "alpha of the noise on embeddings"),
    ):
        before, after = getattr(old, key), getattr(new, key)
        if before != after:
            yield f"{words} {_or_none(before)} -> {_or_none(after)}"
    if old.qat != new.qat:
        yield f"rounded in training: {_rounding(old)} -> {_rounding(new)}"
    if old.optimizer.learning_rate != new.optimizer.learning_rate:
        factor = new.optimizer.learning_rate / old.optimizer.learning_rate
        yield (
            f"peak learning rate {old.optimizer.learning_rate:g} -> {new.optimizer.learning_rate:g} "
            f"({factor:.3g}x)"
        )
    norms = old.optimizer.max_grad_norm, new.optimizer.max_grad_norm
    if norms[0] != norms[1]:
        yield f"gradients clipped to norm {_or_none(norms[0])} -> {_or_none(norms[1])}"
    rest = [
        k
        for k in ("b1", "b2", "eps", "weight_decay")
        if getattr(old.optimizer, k) != getattr(new.optimizer, k)
    ]
    for key in rest:
        yield f"AdamW's {key} {getattr(old.optimizer, key):g} -> {getattr(new.optimizer, key):g}"
    if old.schedule != new.schedule:
        yield f"schedule {_schedule(a)} -> {_schedule(b)}"
    if old.early_stopping != new.early_stopping:
        yield f"early stopping: {_stopping(old)} -> {_stopping(new)}"
    if old.seed != new.seed:
        yield "other initial adapters and dropout (seed)"
    if a.recipe.remat.policy != b.recipe.remat.policy:
        yield f"recomputed in the backward pass: {a.recipe.remat.policy} -> {b.recipe.remat.policy}"


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
    end = "" if schedule.name == "constant" else f" to {schedule.final_ratio:g} of the peak"
    return f"{schedule.name}{end}, warm-up {warm or 'none'}"


def _stopping(train: Train) -> str:
    given = train.early_stopping
    return "none" if given is None else f"patience {given.patience}, min_delta {given.min_delta:g}"


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
    if old.directory != new.directory:
        yield f"checkpoints under {old.directory} -> {new.directory}"
    if (old.every_steps, old.keep) != (new.every_steps, new.keep):
        yield (
            f"a checkpoint every {plural(old.every_steps, 'step')}, {old.keep} kept -> every "
            f"{plural(new.every_steps, 'step')}, {new.keep} kept"
        )
    if old.keep_best != new.keep_best:
        yield f"the best checkpoint is {'kept' if new.keep_best else 'no longer kept'}"
    if old.local != new.local:
        yield f"local checkpoints: {_local(old.local)} -> {_local(new.local)}"
    if a.recipe.merge.dtype != b.recipe.merge.dtype:
        yield f"merged weights in {a.recipe.merge.dtype} -> {b.recipe.merge.dtype}"
    if a.recipe.merge.quantization != b.recipe.merge.quantization:
        yield (
            f"merged linear weights quantized to {a.recipe.merge.quantization or 'none'} -> "
            f"{b.recipe.merge.quantization or 'none'}"
        )


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
