"""Tests of how runs are compared: limits, runs that cannot be compared, the table, and foreign traces."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from recipec.compiler.cli import main as cli
from recipec.compiler.pages.text import write
from recipec.compiler.parity.compare import (
    TOLERANCES,
    ComparedRun,
    Deviation,
    compare,
    document,
    tolerances_of,
)
from recipec.runtime.training.trace import Trace

A, B = "layers.0.self_attn.q_proj.lora_A", "layers.0.self_attn.q_proj.lora_B"
FLOAT32 = TOLERANCES["float32"] | {"trained": 1e-4}


def trace(backend: str = "tunix", **changes: Any) -> Trace:
    """Return a trace of two steps, in which A's gradient is zero, as it is with a zero B."""
    arrays = {A: np.zeros((2, 4), np.float32), B: np.full((6, 2), 0.5, np.float32)}
    trained = {A: np.full((2, 4), 0.1, np.float32), B: np.full((6, 2), 0.01, np.float32)}
    about = {"dtype": changes.pop("dtype", "float32")}
    return replace(Trace(backend, "tiny", about, [3.0, 2.5], [40, 38], arrays, trained), **changes)


def moved(arrays: dict[str, np.ndarray], name: str, by: float) -> dict[str, np.ndarray]:
    """Return the arrays with a change of one number."""
    out = {key: array.copy() for key, array in arrays.items()}
    out[name].flat[3] += np.float32(by)
    return out


def rows(*traces: Trace, tolerances: dict[str, float] | None = None, **options: Any) -> dict[str, Deviation]:
    limits = FLOAT32 if tolerances is None else tolerances
    found = compare([ComparedRun(t.backend, t) for t in traces], limits, **options)
    return {row.quantity: row for row in found}


def test_equal_traces_have_no_differences() -> None:
    found = rows(trace(), trace("trl"))
    assert list(found) == ["targets", "gradients", "losses", "trained"]
    assert all(row.ok and row.difference == 0 for row in found.values())


def held(size: int = 1, last: int = 9, pad: int = 0, **changes: Any) -> Trace:
    """Return a trace with its first adapters and two steps of two rows, `size` in a micro-batch."""
    tokens = np.array([[[3, 4, 5, pad]], [[6, 7, 8, last]]], np.int32).reshape(2 // size, size, 4)
    there = np.array([[[1, 1, 2, 0]], [[1, 1, 1, 1]]], np.int32).reshape(tokens.shape)
    step = {"tokens": tokens, "positions": there, "segment_ids": there, "loss_mask": there > 0}
    first = {A: np.full((2, 4), 0.1, np.float32), B: np.zeros((6, 2), np.float32)}
    return trace(**{"initial": first, "rows": [step, step], **changes})


def test_rows_and_first_adapters_are_compared_where_both_traces_hold_them() -> None:
    found = rows(held(), held(2, pad=1, backend="trl"))
    assert list(found) == ["targets", "rows", "initial", "gradients", "losses", "trained"]
    assert all(row.ok for row in found.values()) and found["rows"].note == "4 rows in 2 steps"
    assert not {"rows", "initial"} & rows(held(), trace("trl")).keys()
    other = held(2, last=8, backend="trl", initial=moved(held().initial, A, 2e-6))
    found = rows(held(), other)
    assert {row.quantity for row in found.values() if not row.ok} == {"rows", "initial"}
    assert (found["rows"].difference, found["rows"].largest) == (1, 2)
    assert found["rows"].note == "step 1: 1 of its rows" and found["initial"].note == A


CHANGES: dict[str, tuple[Callable[[Trace], Trace], str, str]] = {
    "tokens": (lambda t: replace(t, targets=[40, 37]), "targets", "step 2: 38 and 37"),
    "loss": (lambda t: replace(t, losses=[3.0, 2.5002]), "losses", "step 2"),
    "loss that is none": (lambda t: replace(t, losses=[3.0, float("nan")]), "losses", "step 2"),
    "no loss": (lambda t: replace(t, losses=[]), "losses", "there are none"),
    "gradient": (lambda t: replace(t, gradients=moved(t.gradients, B, 2e-5)), "gradients", B),
    "gradient of its own": (
        # A ten-thousandth of the others' and well within the limit, but zero on one side.
        lambda t: replace(t, gradients=moved(t.gradients, A, 5e-6)),
        "gradients",
        f"{A} is off by 100% of its own largest entry",
    ),
    "missing array": (
        lambda t: replace(t, gradients={B: t.gradients[B]}),
        "gradients",
        f"only tunix has {A}",
    ),
    "another array": (
        lambda t: replace(t, trained=t.trained | {"x": np.ones(1), "y": np.ones(1)}),
        "trained",
        "only trl has x and 1 more",
    ),
    "shape": (
        lambda t: replace(t, trained=t.trained | {A: np.ones((4, 2))}),
        "trained",
        f"{A} has shape [2, 4] and [4, 2]",
    ),
    "not finite": (
        lambda t: replace(t, trained=moved(t.trained, A, float("inf"))),
        "trained",
        f"{A} holds values that are not finite",
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_compare_names_the_differing_quantity(kind: str) -> None:
    change, quantity, note = CHANGES[kind]
    found = rows(trace(), change(trace("trl")))
    assert not found[quantity].ok and found[quantity].note == note
    assert {row.quantity for row in found.values() if not row.ok} <= {quantity, "losses"}


def test_gradient_limit_scales_with_largest_entry_and_given_tolerance() -> None:
    large = trace("trl", gradients={A: np.zeros((2, 4)), B: np.full((6, 2), 20.0)})
    other = replace(large, backend="tunix", gradients=moved(large.gradients, B, 1e-4))
    assert rows(large, other)["gradients"].ok
    assert rows(large, other)["gradients"].limit == pytest.approx(2e-4, rel=1e-4)
    assert not rows(large, other, tolerances=FLOAT32 | {"gradients": 1e-6})["gradients"].ok
    # Quantities without a limit are shown.
    shown = rows(trace(), trace("trl", losses=[9.0, 9.0]), tolerances={})["losses"]
    assert shown.ok and shown.limit is None and shown.difference == pytest.approx(6.5)


@pytest.mark.parametrize(
    ("dtype", "device", "off", "ok"),
    [
        ("float32", "cpu", 2e-5, False),
        ("float32", "cuda:0", 2e-5, True),
        ("float32", "cuda:0", 2e-4, False),
        ("bfloat16", "cuda:0", 0.05, True),
        ("bfloat16", "cuda:0", 0.1, False),  # of 0.5: a limit below the largest gradient
    ],
)
def test_limits_follow_the_dtype_and_the_device(dtype: str, device: str, off: float, ok: bool) -> None:
    about = {"dtype": dtype, "device": device}
    pair = trace(about={"dtype": dtype, "device": "cpu"}), trace("trl", about=about)
    pair[1].gradients.update(moved(pair[1].gradients, B, off))
    assert rows(*pair, tolerances=tolerances_of(pair))["gradients"].ok is ok


def test_control_run_widens_a_limit_to_ten_times_its_difference() -> None:
    far = trace("trl", losses=[3.0, 2.504], trained=moved(trace().trained, B, 2e-3))
    control = [
        Deviation("losses", "trl", "control", 1e-3, 3.0, None, True),
        Deviation("trained", "trl", "control", 1e-5, 0.1, None, True),
    ]
    found = rows(trace(), far, control=control)
    assert found["losses"].ok and found["losses"].limit == pytest.approx(1e-2)
    assert not found["trained"].ok, "ten times this control is the tolerance itself"
    assert not rows(trace(), far)["losses"].ok


def test_merged_weights_are_compared_tensor_by_tensor() -> None:
    tensors = {"model.embed_tokens.weight": np.ones((3, 2), np.float32), "model.norm.weight": np.ones(2)}
    changed = tensors | {"model.norm.weight": np.array([1.0, 1.00005])}
    runs = [
        ComparedRun("tunix", trace(), {name: lambda array=array: array for name, array in tensors.items()}),
        ComparedRun(
            "trl", trace("trl"), {name: lambda array=array: array for name, array in changed.items()}
        ),
        ComparedRun("torchax", trace("torchax")),
    ]
    (row,) = [row for row in compare(runs, FLOAT32) if row.quantity == "merged"]
    assert (row.left, row.right, row.note, row.ok) == ("tunix", "trl", "model.norm.weight", False)
    assert row.difference == pytest.approx(5e-5, rel=1e-2)


def test_table_lists_every_pair_and_left_out_backends() -> None:
    runs = [ComparedRun(t.backend, t) for t in (trace(), trace("trl"), trace("torchax", losses=[3.0, 2.6]))]
    control = [Deviation("losses", "trl", "control", 3.1e-7, 3.0, None, True)]
    found = compare(runs, FLOAT32, control)
    shown = write(document("parity of tiny", found, control, {"other": "E0922, nothing"}))
    cells = [re.split(" {2,}", line) for line in shown.splitlines()]
    assert ["losses", "tunix - torchax", "0.1", "3", "0.0333", "1e-4", "failed", "step 2"] in cells
    assert ["losses", "trl - control", "3.1e-7", "3", "1e-7", "control"] in cells
    assert shown.count("failed") == 2
    assert "left out: other: E0922, nothing" in shown


def recipe(*arguments: str | Path) -> tuple[int, str, str]:
    """Run `recipe parity`: exit status, stdout and stderr."""
    result = CliRunner().invoke(cli.app, ["parity", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


def files(folder: Path, **traces: Trace) -> list[Path]:
    for name, one in traces.items():
        one.write(folder / f"{name}.npz")
    return [folder / f"{name}.npz" for name in traces]


def test_compare_command_uses_tolerances_of_the_trace_dtype(tmp_path: Path) -> None:
    near = trace("trl", losses=[3.0, 2.501], gradients=moved(trace().gradients, B, 1e-3), dtype="bfloat16")
    gpu, tpu = files(tmp_path, gpu=near, tpu=trace(dtype="bfloat16"))
    status, printed, _ = recipe("--compare", gpu, tpu)
    assert status == 0 and "trl - tunix" in printed and "tiny, 2 steps, bfloat16" in printed
    status, printed, _ = recipe("--compare", gpu, tpu, "--tolerance", "losses=1e-4")
    assert status == 1 and "failed" in printed
    status, printed, _ = recipe(
        "--compare", *files(tmp_path, a=trace(), b=trace(losses=[3.0, 2.501])), "--json"
    )
    found = json.loads(printed)
    assert status == 1 and found["ok"] is False
    (failed,) = [row for row in found["rows"] if not row["ok"]]
    assert failed | {"quantity": "losses", "left": "a", "right": "b", "limit": 1e-4} == failed


def test_traces_that_cannot_be_compared_are_refused_with_the_reason(tmp_path: Path) -> None:
    (one,) = files(tmp_path, one=trace())
    status, _, err = recipe("--compare", one)
    assert status == 2 and "name at least two traces" in err
    status, _, err = recipe("--compare", one, tmp_path / "nothing.npz")
    assert status == 1 and f"error: {tmp_path / 'nothing.npz'}: no such file" in err
    (other,) = files(tmp_path, other=replace(trace(), recipe="large"))
    status, _, err = recipe("--compare", one, other)
    assert status == 1 and "is a trace of the recipe large" in err
    (empty,) = files(tmp_path, empty=trace(losses=[]))
    assert "has no steps" in recipe("--compare", one, empty)[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.npz"], "add --compare"),
        (["a.yaml", "b.yaml"], "give one recipe"),
        (["--compare", "a.npz", "b.npz", "--keep", "x"], "cannot be combined with"),
        (["a.yaml", "--tolerance", "loss=1e-4"], "is not one of initial, gradients, losses, trained, merged"),
        (["a.yaml", "--tolerance", "losses=-1"], "is not a limit"),
        ([], "Missing argument"),
    ],
)
def test_wrong_parity_arguments_exit_with_status_2(arguments: list[str], message: str) -> None:
    status, _, err = recipe(*arguments)
    assert status == 2 and message in err.replace("│ ", "").replace(" │", "")
