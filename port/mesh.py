"""The mesh of a ported recipe: how the source's GPUs map to the requested accelerator.

The rows of an optimizer step decide what is learned, so the source's number is kept if any mesh allows it.
A TPU tool's own axes are tried first, if they use as many devices. Otherwise fsdp gets as many devices as
divide the rows, and tp gets the rest, in sizes that pass the recipe's checks. Experts are split over ep if
they do not fit on fsdp alone, by the estimate of `recipe new`. The rows are rounded up only if no mesh
allows the source's number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from recipec.compiler.arrangements import Arrangement, arrangements, concerns_mesh, splittable
from recipec.compiler.checks.train import E0722
from recipec.compiler.lower import Lowered
from recipec.compiler.lowering.hardware import Accelerator
from recipec.compiler.roofline.step_estimate import Need, fits, need
from recipec.compiler.wording import plural
from recipec.port.ledger import Ledger, Verdict
from recipec.port.meaning import model_names
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic

ROWS, MICRO = "train.global_batch_size", "train.micro_batch_size"

MOST_ROWS = 10**6
"""The largest `train.global_batch_size` that a recipe may have."""

Examine = Callable[[], Lowered]
"""Checks and lowers the recipe with the ledger's current values."""


@dataclass(frozen=True)
class Batch:
    """The rows of the source's optimizer step and micro-batch. `rows` is None if the files do not say."""

    rows: int | None
    micro: int


E1111 = Code(
    "E1111",
    "no mesh fits the run",
    cause="The checks refused every arrangement of the accelerator's devices.",
    cure="Use another `--accelerator`.",
)


def choose(ledger: Ledger, accelerator: Accelerator, examine: Examine) -> Batch:
    """Set the mesh and the micro-batch, and return the source's batch."""
    ledger.set("mesh.accelerator", accelerator.name, _machine(accelerator))
    before = Batch(_whole(ledger.value(ROWS)), _whole(ledger.value(MICRO)) or 1)
    batched = before.rows is not None
    rows = before.rows or accelerator.devices
    chosen_axes = ledger.value("mesh.axes")
    experts = _experts(ledger) if chosen_axes is None else 1
    ways = list(arrangements(accelerator.devices, rows, before.micro, experts))
    ways.sort(key=lambda way: chosen_axes != way.axes)
    refused: list[Diagnostic] = []
    passing: list[tuple[Arrangement, Need]] = []
    for way in ways:
        if passing and way.tp > 1:
            break  # tp does not split what the experts take
        _apply(ledger, way, batched, _reason(passing, accelerator) if way.ep > 1 else "")
        lowered = examine()
        errors = [d for d in lowered.diagnostics if d.severity == "error"]
        problems = [d for d in errors if concerns_mesh(d) or (d.code == E0722 and before.micro > 1)]
        refused = refused or problems
        if problems:
            continue
        if experts == 1 or lowered.program is None:
            return before
        takes = need(lowered.program)
        if fits(accelerator, takes.most):
            return before
        passing.append((way, takes))
    likely = next((way for way, takes in passing if fits(accelerator, takes.least)), None)
    if passing:
        chosen = likely or passing[0][0]
        _apply(ledger, chosen, batched, _reason(passing, accelerator) if chosen.ep > 1 else "")
        return before
    _apply(ledger, ways[0], batched)
    message = f"no arrangement of the devices of {accelerator.name} fits this run: {refused[0].message}"
    help = "ask for a larger --accelerator"
    ledger.diagnostics.append(Diagnostic(E1111, message, refused[0].path, help))
    return before


def _experts(ledger: Ledger) -> int:
    """Return the experts of a layer that ep can split; 1 for none, or for an unknown model."""
    model = model_names.resolve(str(ledger.value("model.id")), ledger.home).model
    return 1 if model is None else splittable(model.family, model.architecture)


def _reason(passing: Sequence[tuple[Arrangement, Need]], accelerator: Accelerator) -> str:
    """Return why experts are split over ep: what the step takes without it."""
    if not passing:
        return ""
    takes, has = passing[0][1].most / 2**30, accelerator.hbm_bytes_per_device / 2**30
    return f"all on fsdp, a step may take {takes:.1f} of {has:.1f} GiB, by estimate"


def _apply(ledger: Ledger, way: Arrangement, batched: bool, why: str = "") -> None:
    ledger.set("mesh.axes", way.axes, why)
    if batched:
        for path, value in ((ROWS, way.rows), (MICRO, way.micro)):
            ledger.set(path, value, ledger.lines[path].comment if path in ledger.lines else "")


def _machine(accelerator: Accelerator) -> str:
    counted = accelerator.name_counts == "tensorcores" and accelerator.devices_per_chip == 1
    chips = f"{accelerator.name} has {plural(accelerator.chips, 'chip')}: its number counts TensorCores"
    return chips if counted else ""


OTHER_ROWS = "the mean of each micro-batch's mean covers other rows"


W1116 = Code(
    "W1116",
    "different number of rows in an optimizer step",
    cause="No mesh of the accelerator fits the source's global batch. The port rounds it up to one "
    "that fits.",
    cure="Use another `--accelerator`, or another batch size in the source.",
)


def tell(ledger: Ledger, before: Batch) -> None:
    """Say how the rows are laid out on the devices, and what differs from the source.

    Adds a comment and a finding to the batch's keys, and a warning if the rows of a step change.
    """
    axes, rows, micro = ledger.value("mesh.axes"), ledger.value(ROWS), ledger.value(MICRO)
    if before.rows is None:
        return
    way = Arrangement(axes["fsdp"], axes["tp"], micro, rows, axes.get("ep", 1))
    shared = f", {way.tp} devices sharing each row" if way.tp > 1 else ""
    over = f" x ep {way.ep}" if way.ep > 1 else ""
    product = (
        f"{plural(rows, 'row')} per step: {micro} x fsdp {way.fsdp}{over} x {way.accumulation} "
        f"micro-batch{'' if way.accumulation == 1 else 'es'}{shared}"
    )
    if rows == before.rows:
        means = ledger.value("train.loss_normalization") == "micro_batches"
        differs = means and micro * way.parallel != (ledger.means or before.micro)
        note = f"{product}; {OTHER_ROWS}" if differs else product
        ledger.amend(MICRO, Verdict.APPROXIMATED if differs else Verdict.EXACT, note)
        if differs:
            _comment(ledger, MICRO, OTHER_ROWS)
        return
    why = f"the source has {before.rows}, which no mesh of these devices can split"
    _comment(ledger, ROWS, why)
    ledger.amend(ROWS, Verdict.APPROXIMATED, f"{why}; {product}")
    place = next((f.span for f in ledger.findings if ROWS in f.recipe and f.span), None)
    message = f"an optimizer step takes {plural(rows, 'row')} instead of {before.rows}"
    help = "choose an --accelerator whose number of devices divides the rows"
    ledger.diagnostics.append(Diagnostic(W1116, message, ROWS, help, place))


def _comment(ledger: Ledger, path: str, comment: str) -> None:
    line = ledger.lines[path]
    if comment not in line.comment:
        ledger.lines[path] = replace(line, comment="; ".join(filter(None, (line.comment, comment))))


def _whole(value: object) -> int | None:
    """Return a number of rows that the language allows, or None, which the recipe's checks report."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 < value <= MOST_ROWS else None
