"""How scripts that train with jax end: after their work, an error, a signal, or another process's failure."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import UserError, guarded
from ..hosts.single import SINGLE, SingleProcess, alone
from ..interrupts import Interrupted, Interrupts, name_of

if TYPE_CHECKING:
    from ..hosts.group import ProcessGroup


@contextmanager
def out_of_memory() -> Iterator[None]:
    """Turn an out-of-memory error of the devices in this context into an error that says what to do."""
    import jax

    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(
            f"the devices ran out of memory: {str(error).splitlines()[0][:200]}",
            "lower train.micro_batch_size or data.max_length, or set remat.policy to decoder",
        ) from error


def attended(
    gone: Callable[[int], str], hosts: int, work: Callable[[Interrupts, SingleProcess | ProcessGroup], int]
) -> int:
    """Run the work of a script, and turn errors and signals into a sentence and an exit status.

    Args:
        gone: returns the sentence for a signal, from its number.
        hosts: machines that the recipe's mesh spans.

    Returns:
        The status that `work` returns, 1 after an error that was printed, or 128 + the signal's number after
        a signal. If one of several processes fails, it ends at once, and the others end with it: with 1 if a
        person has to fix the error, with runtime.errors.PASSING if another process disappeared.
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
    """Return the message about a run that a signal ends, and about the files that it leaves."""
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
