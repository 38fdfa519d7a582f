"""Tests of the rows that each process has of a micro-batch, on every layout of 8 devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest

from recipec.runtime.model.partition_rules import data_parallel
from recipec.runtime.model.sharding import Rows, row_sharding

LAYOUTS = [
    {"fsdp": 4, "tp": 2},
    {"fsdp": 1, "tp": 8},
    {"dcn": 2, "fsdp": 2, "tp": 2},
    {"dcn": 2, "fsdp": 1, "tp": 4},
]


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_processes_together_have_every_row_of_the_micro_batch(
    axes: Mapping[str, int], processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that exactly the processes that need a row have it, in the place where their devices read it."""
    import jax
    from jax.sharding import NamedSharding

    from recipec.runtime.model.sharding import arrange

    mesh = arrange(axes, jax.devices())
    total = 2 * data_parallel(axes)
    per = 8 // processes
    whole = row_sharding(mesh, total).devices_indices_map((total,))
    found: Counter[int] = Counter()
    for process in range(processes):
        devices = jax.devices()[process * per : (process + 1) * per]
        with monkeypatch.context() as patch:
            patch.setattr(
                NamedSharding,
                "addressable_devices_indices_map",
                lambda self, shape, devices=devices: {device: whole[device] for device in devices},
            )
            rows = Rows.of(mesh, total)
        needed = {row for device in devices for row in range(total)[whole[device][0]]}
        assert rows.here == tuple(sorted(needed))
        values = np.asarray(rows.here)
        for device in devices:
            assert list(rows._part(values, whole[device])) == list(range(total)[whole[device][0]])
        found.update(rows.here)
    assert sorted(found) == list(range(total))
    if processes <= data_parallel(axes):
        assert set(found.values()) == {1}, "nobody reads what another one reads"
    else:
        assert set(found.values()) == {processes // data_parallel(axes)}
