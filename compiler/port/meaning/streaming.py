"""Data sets that are streamed: read during the run, here in windows."""

from __future__ import annotations

from collections.abc import Sequence

from recipec.compiler.port.keys import Keys

WINDOWS = "recipec shuffles and packs rows within windows of this size: another order of samples"
KEPT = "rows come in the sources' order, as in the tool; recipec packs them within windows of this size"


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
        keys.same(switch, note="off: all rows are read first, as in recipec")
        keys.unused(buffers, f"the tool does not read it without {switch}")
        return
    why = None
    if not ledger.value("train.steps"):
        why = "the file gives no number of steps, which streaming in recipec needs"
    elif ledger.value("data.eval_fraction"):
        why = "the run holds out a share of the rows, which requires counting them"
    if why is not None:
        keys.unless(switch, (False,), f"recipec reads all rows first: {why}")
        keys.unused(buffers, "recipec reads all rows first")
        return
    buffer = next((key for key in buffers if keys.given(key)), buffers[0] if buffers else None)
    found = keys.integer(buffer) if buffer is not None else None
    sets = {"data.stream_window": found if found and found > 0 else size}
    ledger.set("data.stream_window", sets["data.stream_window"])
    note = KEPT if ledger.value("data.shuffle_seed", 0) is None else WINDOWS
    keys.say(switch, sets if keys.given(switch) else None, note)
    for key in buffers:
        keys.same(key, sets if key == buffer else None)
