"""What `make bench` says of the flagship's estimate beside those of what it is held against."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench import planning


def made(rows: int, compiler: float, loops: float, kernels: float, mfu: float) -> dict[str, Any]:
    """A plan's JSON, of what is read."""
    estimate = {
        "rows": rows,
        "memory": {"weights": 2**30, "available": 2**36},
        "compiler_seconds": compiler,
        "loop_seconds": loops,
        "kernel_seconds": kernels,
        "seconds": compiler + loops + kernels,
        "mfu": mfu,
    }
    return {"estimate": estimate}


def test_what_stands_between_the_flagship_and_the_target_is_computed() -> None:
    text = planning._flagship(
        made(4, 1.160, 0.041, 0.197, 0.6), made(1, 0.506, 0.010, 0.0, 0.2), {"gib": 18.1, "seconds": 0.614}
    )
    # 1.398 s for 4 rows of 3,072 that are 97 % full; 0.516 s and 0.614 s for 922 tokens.
    assert (
        "Target: 7 times against gemma4-31b-paper.yaml: missed, 4.8; against what was published: missed, 5.7"
        in text
    )
    own, paper, published = 1.398 / (4 * 3072 * 0.97), 0.516 / 922, 0.614 / 922
    assert 0.6 * own / (paper / 7) == pytest.approx(0.880, abs=5e-4)
    assert 0.6 * own / (published / 7) == pytest.approx(0.740, abs=5e-4)
    assert "gemma4-31b-paper.yaml 7 times is 0.0800 ms, an MFU of 88% (at 100% it would be 8.0 times)" in text
    assert (
        "against what was published 7 times is 0.0951 ms, an MFU of 74% (at 100% it would be 9.5 times)"
        in text
    )
    # 0.6 of 1.398 at the peak, half of the kernels' time, the loops, and the rest.
    assert "Of the step's 1.398 s, 0.839 s are" in text
    assert "0.099 s the half of the peak" in text
    assert "0.041 s loops, and 0.420 s what else" in text
