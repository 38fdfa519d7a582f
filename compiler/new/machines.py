"""The machines on which a model fits, by estimates of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.hardware import (
    Accelerator,
    UnknownAccelerator,
    from_name,
    generations,
    known_generation,
    known_names,
)
from recipec.compiler.new.draft import Probe, drafts, smallest_need
from recipec.compiler.new.new_recipe_text import gib
from recipec.compiler.wording import listing
from recipec.spec.diagnostics import Diagnostic

CPU = "cpu-8"
"""Represents all CPU machines."""

TITLES = {"lora": "LoRA", "qlora": "QLoRA", "dpo": "DPO", "kto": "KTO", "full": "full fine-tuning"}


@dataclass(frozen=True)
class Fit:
    """A machine, and the method that fits it; None if no method does.

    Attributes:
        sure: whether it fits by the upper bound of its memory; if not, only a plan can tell.
    """

    accelerator: Accelerator
    method: str | None
    sure: bool = True

    def way(self) -> str:
        """Return "LoRA", or "QLoRA, if `recipe plan` confirms it"."""
        return TITLES[self.method or "lora"] + ("" if self.sure else ", if `recipe plan` confirms it")


def named(name: str) -> Accelerator:
    """Return the machine of this name.

    Raises:
        ArtifactError: when it is unknown.
    """
    try:
        return from_name(name.strip())
    except UnknownAccelerator as error:
        raise ArtifactError(str(error), error.help) from None


def generation_of(name: str) -> str | None:
    """Return the generation that a name without a size stands for: "v6e" for v6e or trillium; None for any
    other name."""
    known = known_generation(name.strip().lower())
    return known if known in generations() else None


def of_generation(probe: Probe, generation: str, method: str | None) -> Accelerator:
    """Return the cheapest machine of a generation on which a model fits, as `cheapest` does.

    Raises:
        ArtifactError: when it fits none with a single host.
    """
    sizes = [machine for machine in machines() if machine.generation == generation]
    fitting = [candidate for machine in sizes if (candidate := fit(probe, machine, method)).method]
    if not fitting:
        raise refusal(probe, sizes[-1], method)
    return cheapest(fitting)


def cheapest(fits: Sequence[Fit]) -> Accelerator:
    """Return the least expensive machine, preferring those that surely fit and need no quantized base."""
    sure = [fit for fit in fits if fit.sure] or fits
    plain = [fit for fit in sure if fit.method != "qlora"] or sure
    priced = [fit for fit in plain if fit.accelerator.usd_per_hour is not None] or plain
    return min((fit.accelerator for fit in priced), key=lambda machine: machine.usd_per_hour or 0)


def largest(generation: str) -> Accelerator:
    """Return the largest machine of a generation with a single host."""
    return [machine for machine in machines() if machine.generation == generation][-1]


def machines() -> Iterator[Accelerator]:
    """Yield the machines with a single host, which suit a first run, and one of CPU devices."""
    for name in known_names():
        machine = from_name(name)
        if machine.platform == "tpu" and machine.hosts == 1:
            yield machine
    yield from_name(CPU)


def fit(probe: Probe, machine: Accelerator, method: str | None) -> Fit:
    """Return the machine with the method that fits a model on it."""
    draft = next(drafts(probe, machine, method), None)
    return Fit(machine, draft.method, draft.sure) if draft else Fit(machine, None)


def refusal(
    probe: Probe, machine: Accelerator, method: str | None, why: Diagnostic | None = None
) -> ArtifactError:
    """Return the error that says a model does not fit a machine, and which machines it fits.

    Args:
        why: the finding of the checks; None if the memory is too small.
    """
    available = machine.hbm_bytes_per_device
    least = gib(smallest_need(probe, machine, method))
    model = probe.program.recipe.model.id
    message = (
        f"{model} does not fit {machine.name}: a step takes at least about {least} GiB of each device, "
        f"of which {gib(available)} GiB are available"
        if why is None
        else why.message
    )
    fits = [fit(probe, other, method) for other in machines() if other.platform == "tpu"]
    some = [fit for fit in fits if fit.method]
    some = [fit for fit in some if fit.sure] or some
    fitting = [f"{fit.accelerator.name} ({fit.way()})" for fit in some]
    ways = [f"it fits {listing(fitting, 'or')}"] if fitting else []
    smaller = fit(probe, machine, "qlora") if method in ("lora", "full") else Fit(machine, None)
    if smaller.method and smaller.sure:
        ways.append(f"--method qlora fits {machine.name}")
    return ArtifactError(message, "; ".join(ways) or "choose a smaller model")
