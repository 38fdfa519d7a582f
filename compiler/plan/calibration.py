"""How much longer a TPU took than the compiler's estimate, the one time that both are known.

`python -m tests.bench planning` compiles the published program and shows its estimate; the figures are in
data/calibration.json.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "data" / "calibration.json"


@functools.cache
def factor() -> float:
    """Measured over estimated seconds."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    return float(data["measured"]["seconds"]) / float(data["estimated"]["seconds"])


def sentence() -> str:
    """What a calibrated figure rests on."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    measured, estimated = data["measured"], data["estimated"]
    return (
        f"The one published measurement of such a run ({measured['source']}: {measured['seconds']:g} s a "
        f"sample) took {factor():.2f} times what this compiler estimates for it ({estimated['seconds']:g} s)."
    )
