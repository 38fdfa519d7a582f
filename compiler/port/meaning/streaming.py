"""Data sets that are streamed: read during the run, here in windows."""

from __future__ import annotations

from collections.abc import Sequence

from recipec.compiler.port.keys import Keys

WINDOWS = "rows are shuffled and packed within windows of as many here: another order of samples"
KEPT = "in the sources' order, as there; rows are packed within windows of as many"


def say_stream(
    keys: Keys, switch: str, buffers: Sequence[str] = (), size: int = 1000, on: bool | None = None
) -> None:
    """Record a switch for streaming, after all other keys of the data and of the run's length.

    Args:
        buffers: keys for the number of rows to shuffle among; the first one in the file counts.
        size: the number of these rows if no key gives it.
        on: whether the run streams, regardless of the switch; None reads the switch.
    """
    ledger = keys.ledger
    if not on and not keys.flag(switch):
        keys.same(switch, note="off: all rows are read first, as here")
        keys.unused(buffers, f"without {switch} it is not read")
        return
    why = None
    if not ledger.value("train.steps"):
        why = "no number of steps is given, without which there is no stream here"
    elif ledger.value("data.eval_fraction"):
        why = "a share of the rows is held out, which takes counting them"
    if why is not None:
        keys.unless(switch, (False,), f"all rows are read first here: {why}")
        keys.unused(buffers, "all rows are read first here")
        return
    buffer = next((key for key in buffers if keys.given(key)), buffers[0] if buffers else None)
    found = keys.integer(buffer) if buffer is not None else None
    sets = {"data.stream_window": found if found and found > 0 else size}
    ledger.set("data.stream_window", sets["data.stream_window"])
    note = KEPT if ledger.value("data.shuffle_seed", 0) is None else WINDOWS
    keys.say(switch, sets if keys.given(switch) else None, note)
    for key in buffers:
        keys.same(key, sets if key == buffer else None)
