"""What the `train` section turns into: batches, length, optimizer chain and schedule, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from compiler.sizes import needs_master_weights
from compiler.steps import held_out, run_length, warmup_steps
from compiler.wording import plural, quantity
from runtime.specs import DATA

if TYPE_CHECKING:
    from compiler.program import Program
    from spec.language import Optimizer


def whole(program: Program) -> list[str]:
    return [*batches(program), *_length(program), *_chain(program)]


def batches(program: Program) -> list[str]:
    train, data = program.recipe.train, program.recipe.data
    room = train.global_batch_size * data.max_length
    over = " x ".join(axis for axis in DATA if axis in program.recipe.mesh.axes)
    return [
        f"micro_batch_size {train.micro_batch_size} x {over} {program.data_parallel} = "
        f"{plural(program.micro_batch_rows, 'row')} a micro-batch, {_micro_batches(program)} a step: "
        f"{plural(train.global_batch_size, 'row')}, {room:,} tokens of room",
        {
            "tokens": "the loss is the mean over all target tokens of a step",
            "micro_batches": "the loss is the mean of the micro-batches' means",
        }[train.loss_normalization],
    ]


def _micro_batches(program: Program) -> str:
    count = program.accumulation_steps
    return "1 micro-batch" if count == 1 else f"{count:,} micro-batches"


def _length(program: Program) -> list[str]:
    recipe = program.recipe
    length = run_length(recipe, program.source.parent)
    per_step = recipe.train.global_batch_size * recipe.data.max_length
    counted = (
        "steps = epochs x rows that are kept / global_batch_size, each epoch rounded up; train.py counts "
        "them as it starts"
    )
    if length.steps is None:
        return [counted]
    if length.exact:
        tokens = length.steps * per_step
        return [f"{length.words()}, at most {tokens:,} tokens ({quantity(tokens)})"]
    at_hand = length.data.rows if length.data else 0
    rows = plural(at_hand - held_out(recipe.data.eval_fraction, at_hand), "row")
    return [f"{length.words()} of at most {per_step:,} tokens, from {rows} at hand", counted]


def _schedule(program: Program) -> list[str]:
    train = program.recipe.train
    schedule, peak = train.schedule, train.optimizer.learning_rate
    length = run_length(program.recipe, program.source.parent)
    if schedule.warmup_ratio is not None:
        warm = f"ceil({schedule.warmup_ratio:g} x steps) steps"
        if length.exact and length.steps is not None:
            warm = plural(warmup_steps(program.recipe, length.steps), "step")
    else:
        warm = plural(schedule.warmup_steps or 0, "step")
    has_warmup = bool(schedule.warmup_ratio or schedule.warmup_steps)
    start = f"from 0 to {peak:g} in {warm}, then " if has_warmup else f"from {peak:g}, "
    decay = {
        "constant": "constant",
        "cosine": f"along a cosine to {peak * schedule.final_ratio:g} one step after the last",
        "linear": f"in a line to {peak * schedule.final_ratio:g} one step after the last",
    }[schedule.name]
    return [f"learning rate {start}{decay}"]


def _chain(program: Program) -> list[str]:
    """The links that turn a step's gradient into an update, in order."""
    o = program.recipe.train.optimizer
    links = []
    masked = sum(adapter.masked for adapter in program.adapters)
    if masked:
        links.append(
            f"zero the untrained part of the gradient of lora_b in {plural(masked, 'fused adapter')}"
        )
    if o.max_grad_norm is not None:
        links.append(f"optax.clip_by_global_norm({o.max_grad_norm:g})")
    links.append(_rule(o))
    if needs_master_weights(program.recipe):
        links.append("added to a float32 copy of the weights, which is rounded to bfloat16")
    out = [", then ".join([f"optimizer: the mean gradient of {_micro_batches(program)}", *links])]
    if o.max_grad_norm is None:
        out.append("no clipping: max_grad_norm is null")
    return [*out, *_schedule(program)]


def _rule(o: Optimizer) -> str:
    """The optax optimizer with its hyperparameters."""
    decay = f"weight_decay={o.weight_decay:g}"
    if o.name == "adamw":
        return f"optax.adamw(learning_rate, b1={o.b1:g}, b2={o.b2:g}, eps={o.eps:g}, {decay})"
    if o.name == "lion":
        return f"optax.lion(learning_rate, b1={o.b1:g}, b2={o.b2:g}, {decay})"
    if o.name == "adafactor":
        return f"optax.scale_by_factored_rms(), updates clipped to RMS 1, {decay} (Adafactor)"
    return f"optax.sgd(learning_rate, momentum={o.momentum:g}), {decay} added to the gradient"


DETAILS: dict[str, Callable[[Program], list[str]]] = {
    "optimizer": _chain,
    "schedule": lambda program: [*_schedule(program), *_length(program)],
    "epochs": _length,
    "steps": _length,
}
