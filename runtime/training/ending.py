"""How the scripts that train with jax end: after their work, an error, a signal, or another process's end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import UserError, guarded
from ..hosts import SINGLE, SingleProcess, alone
from ..interrupts import Interrupted, Interrupts, name_of

if TYPE_CHECKING:
    from ..hosts.group import ProcessGroup


@contextmanager
def out_of_memory() -> Iterator[None]:
    """Within it, what the devices say when their memory does not suffice is an error with a way out."""
    import jax

    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(
            f"the devices' memory does not suffice: {str(error).splitlines()[0][:200]}",
            "lower train.micro_batch_size or data.max_length, or set remat.policy to decoder",
        ) from error


def attended(
    gone: Callable[[int], str], hosts: int, work: Callable[[Interrupts, SingleProcess | ProcessGroup], int]
) -> int:
    """Does the work of a script; errors and signals become a sentence and an exit status.

    Args:
        gone: the sentence of a signal, from its number.
        hosts: machines that the recipe's mesh spans.

    Returns:
        The work's own status, 1 after an error that was printed, 128 + the signal's number after one. Of
        several processes, one that fails ends at once, and with it the others: with 1 after an error that a
        person has to mend, with runtime.errors.PASSING where another process is gone.
    """
    with Interrupts(gone) as interrupts:
        try:
            return guarded(lambda: _joined(hosts, interrupts, work))
        except Interrupted as interrupted:
            print(f"\n{gone(interrupted.signum)}", file=sys.stderr)
            return 128 + interrupted.signum


def _joined(
    hosts: int, interrupts: Interrupts, work: Callable[[Interrupts, SingleProcess | ProcessGroup], int]
) -> int:
    if alone(hosts):
        return work(interrupts, SINGLE)
    from ..hosts.group import together

    return together(hosts, interrupts, work)


def farewell(signum: int, directory: str) -> str:
    """What to say of a run that a signal ends, and of what it leaves."""
    from ..checkpoints.adapter_reader import saved_steps

    try:
        steps = saved_steps(directory)
    except UserError:
        return f"stopped by {name_of(signum)}; what was saved before is kept"
    if not steps:
        return f"stopped by {name_of(signum)}; no checkpoint was saved yet"
    return (
        f"stopped by {name_of(signum)}; kept: the checkpoint of step {steps[-1]} in {directory}; "
        "--resume continues from it"
    )
