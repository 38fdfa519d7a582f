"""The machines on which a model fits, by estimates of memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.hardware import Accelerator, UnknownAccelerator, from_name, known_names
from recipec.compiler.new.draft import HEADROOM, Probe, drafts, smallest_need
from recipec.compiler.new.new_recipe_text import gib
from recipec.compiler.wording import listing
from recipec.spec.diagnostics import Diagnostic

CPU = "cpu-8"
"""Represents all CPU machines."""

TITLES = {"lora": "LoRA", "qlora": "QLoRA", "dpo": "DPO", "kto": "KTO", "full": "full fine-tuning"}


@dataclass(frozen=True)
class Fit:
    """A machine, and the method that fits it; None if no method does."""

    accelerator: Accelerator
    method: str | None


def named(name: str) -> Accelerator:
    """Return the machine of this name.

    Raises:
        ArtifactError: when it is unknown.
    """
    try:
        return from_name(name.strip())
    except UnknownAccelerator as error:
        raise ArtifactError(str(error), error.help) from None


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
    return Fit(machine, draft.method if draft else None)


def refusal(
    probe: Probe, machine: Accelerator, method: str | None, why: Diagnostic | None = None
) -> ArtifactError:
    """Return the error that says a model does not fit a machine, and which machines it fits.

    Args:
        why: the finding of the checks; None if the memory is too small.
    """
    available = machine.hbm_bytes_per_device * (1 - HEADROOM)
    least = gib(smallest_need(probe, machine, method))
    model = probe.program.recipe.model.id
    message = (
        f"{model} does not fit {machine.name}: a step takes at least about {least} GiB of each device, "
        f"of which {gib(available)} GiB are available"
        if why is None
        else why.message
    )
    found = [fit(probe, other, method) for other in machines() if other.platform == "tpu"]
    fitting = [f"{one.accelerator.name} ({TITLES[one.method]})" for one in found if one.method]
    ways = [f"it fits {listing(fitting, 'or')}"] if fitting else []
    if method in ("lora", "full") and fit(probe, machine, "qlora").method:
        ways.append(f"--method qlora fits {machine.name}")
    return ArtifactError(message, "; ".join(ways) or "choose a smaller model")
