"""Prove that one recipe gives the same run by train.py, TRL and TorchAX, in float32.

The tests compare twenty steps of the scripts that `recipe build` emits, from the same initial adapters on the
same batches. The four families cover packing and padding, accumulation, each loss_on, both means, full and
partial targets, clipping, and meshes of several devices. `make e2e` runs three families, and `make nightly`
runs Qwen 3.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from recipec.compiler.lowering.backend import Backend
from recipec.compiler.parity.compare import TOLERANCES, WORDS, ComparedRun, compare
from recipec.compiler.parity.control import write_perturbed
from recipec.runtime.training.trace import Trace
from tests.parity.parity_cases import CASES
from tests.parity.running import BACKENDS, STEPS, Place, merged_tensors

LIMITS = TOLERANCES["float32"] | {"trained": 1e-5}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Place]:
    """Return a function that makes a case's folder once by its name."""
    made: dict[str, Place] = {}

    def get(name: str) -> Place:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = Place(folder, CASES[name])
        return made[name]

    return get


def test_parity_cases_cover_loss_on_packing_and_normalization() -> None:
    """Check that the cases cover each loss_on, packing and padding, both means, and one and two devices."""
    sections = [case.recipe for case in CASES.values()]
    assert {one["data"]["loss_on"] for one in sections} == {
        "assistant",
        "last_assistant",
        "completion",
        "all",
    }
    assert {one["data"]["packing"] for one in sections} == {True, False}
    assert {one["train"].get("loss_normalization", "tokens") for one in sections} == {
        "tokens",
        "micro_batches",
    }


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly if name in ("qwen3", "gemma3") else pytest.mark.e2e)
        for name in CASES
    ],
)
def test_backends_match_in_losses_gradients_and_trained_weights(
    name: str, place: Callable[[str], Place]
) -> None:
    here = place(name)
    traces = {backend: here.train(backend, backend.value) for backend in BACKENDS}
    runs = []
    for backend, trace in traces.items():
        if backend is not Backend.TUNIX:
            here.merge(backend.value, "--import-adapter", here.folder / backend.value / "adapter")
        runs.append(ComparedRun(backend.value, trace, merged_tensors(here.merge(backend.value))))
    control = []
    if name == "gemma4":
        # Random weights make training chaotic: print how far a perturbed run of TRL's differs, and its limit.
        write_perturbed(here.folder / "perturbed", here.program, here.folder / "model")
        again = here.train(Backend.TRL, "control", "--adapter", here.folder / "perturbed")
        control = compare([runs[1], ComparedRun("control", again)], {})
    rows = compare(runs, LIMITS, control)
    for row in [*rows, *control]:
        where = f"{row.left} - {row.right}, {row.note}"
        print(f"\n{name}: {row.quantity} differ by {row.difference} of {row.largest:.3g}: {where}")
    assert [row for row in rows if not row.ok] == []
    assert {row.quantity for row in rows} == set(WORDS)
    assert len(rows) == 3 * len(WORDS)
    (moved,) = (row for row in compare([runs[0], _untrained(here, runs[0])], {}) if row.quantity == "merged")
    assert moved.difference > 100 * LIMITS["merged"], "the weights have been trained"
    for trace in traces.values():
        assert len(trace.losses) == STEPS and min(trace.targets) > 0
        assert {key: value.shape for key, value in trace.gradients.items()} == {
            key: value.shape for key, value in trace.trained.items()
        }
        largest = max(float(np.abs(array).max()) for array in trace.gradients.values())
        assert largest > 100 * LIMITS["gradients"], "gradients are not flat"


def _untrained(here: Place, run: ComparedRun) -> ComparedRun:
    return ComparedRun("base", run.trace, merged_tensors(here.folder / "model"))


def first(trace: Trace) -> float:
    return trace.losses[0]


@pytest.mark.e2e
def test_a_run_continues_on_another_backend(place: Callable[[str], Place]) -> None:
    """Continue TRL's adapter in train.py, and train.py's in TRL: the next loss is the first library's."""
    here = place("gemma4")
    for backend in (Backend.TUNIX, Backend.TRL):
        if not (here.folder / backend.value).is_dir():
            here.train(backend, backend.value)
    trl, own = here.folder / "trl" / "adapter", here.folder / "tunix" / "merged-adapter"
    if not own.is_dir():
        here.merge("tunix")
    found = {}
    for source, adapter in (("trl", trl), ("tunix", own)):
        here.merge(f"from-{source}", "--import-adapter", adapter)
        found[source, "tunix"] = here.train(Backend.TUNIX, f"from-{source}", "--resume", "--steps", "1")
        found[source, "trl"] = here.train(Backend.TRL, f"back-{source}", "--adapter", adapter, "--steps", "1")
    fresh = here.train(Backend.TRL, "fresh", "--steps", "1")
    for source in ("trl", "tunix"):
        one, other = found[source, "tunix"], found[source, "trl"]
        print(f"\nfrom {source}: {first(one)} and {first(other)}, of fresh adapters {first(fresh)}")
        assert first(one) == pytest.approx(first(other), abs=1e-5)
        assert first(one) < first(fresh) - 0.1, "it is the trained adapters that go on"
        rows = compare([ComparedRun("tunix", one), ComparedRun("trl", other)], LIMITS)
        assert all(row.ok for row in rows), rows
