"""Tests of the experts' load-balancing loss in train_trl.py: its pieces, and a run against train.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipec.compiler.lowering.backend import Backend
from recipec.compiler.parity.compare import TOLERANCES, ComparedRun, compare
from recipec.runtime.settings import CheckpointSettings, DataSettings, ModelSettings, TrainSettings
from tests.parity.parity_cases import recipe
from tests.parity.running import Case, Place
from tests.runtime import training
from tests.runtime.decoders import make

WEIGHT = 0.3
ROOT = Path(__file__).resolve().parents[2]


def train(**more: Any) -> TrainSettings:
    return TrainSettings(steps=1, global_batch_size=8, micro_batch_size=1, **more)


def test_piece_adds_its_share_of_transformers_load_balancing_loss(tmp_path: Path) -> None:
    """Set the model up as SFTTrainer does: without padding, only in training, and without the reference."""
    import torch
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func
    from trl.trainer.utils import add_fused_lm_head

    from recipec.runtime.backends.trl.start import TrlSettings, settings_of
    from recipec.runtime.backends.trl.trl_objectives import objective_of

    settings = [train(router_aux_loss_coef=weight) for weight in (WEIGHT, 0.0)]
    of_trainer = [
        settings_of(
            TrlSettings(
                ModelSettings(id="tiny", family="qwen3_moe", dtype="float32"),
                None,
                DataSettings(train=("train.jsonl",), max_length=16, packing=False),
                one,
                CheckpointSettings("checkpoints"),
                1,
                None,
                False,
            ),
            tmp_path,
            1,
            1,
            cpu=True,
        )
        for one in settings
    ]
    assert [one.router_aux_loss_coef for one in of_trainer] == [WEIGHT, 0.0]

    model = make("qwen3_moe", tmp_path, num_hidden_layers=2, mlp_only_layers=[]).train()
    add_fused_lm_head(model)
    one = training.batch(0)
    tokens = torch.tensor(one["tokens"]).long()
    piece = {
        "input_ids": tokens,
        "position_ids": torch.tensor(one["positions"]).long(),
        "labels": torch.where(torch.tensor(one["loss_mask"]), tokens, -100),
        "real": torch.tensor(one["segment_ids"] > 0),
        "share": torch.tensor(0.25),
        "weights": torch.full((training.ROWS,), 0.01),
    }
    inputs = {"input_ids": tokens, "position_ids": piece["position_ids"], "use_cache": False}
    logits = model(**inputs, output_router_logits=True).router_logits
    expected = 0.25 * load_balancing_loss_func(logits, 7, 3, piece["real"].long())
    results = []
    for how in settings:
        model.config.output_router_logits = how.router_aux_loss_coef != 0.0
        results.append(objective_of(how)(model, model, piece))
    (loss, more), (without, nothing) = results
    assert nothing == {}
    assert float(more["aux_loss"]) == pytest.approx(float(expected), rel=1e-6)
    assert float(loss) == pytest.approx(float(without + WEIGHT * expected), rel=1e-6)
    loss.backward()
    assert float(model.model.layers[0].mlp.gate.weight.grad.abs().max()) > 0

    model.config.output_router_logits = True
    empty = piece | {"real": torch.zeros_like(piece["real"])}
    assert float(objective_of(settings[0])(model, model, empty)[1]["aux_loss"]) == 0.0
    model.eval()
    evaluated, nothing = objective_of(settings[0])(model, model, piece)
    assert nothing == {} and float(evaluated) == pytest.approx(float(without), rel=1e-6)


@pytest.mark.e2e
def test_balanced_gradients_of_two_ddp_processes_match_one_process(tmp_path: Path) -> None:
    """Observe the routers below DDP's wrapper and PEFT's: at most 1e-6 of the largest gradient apart."""
    import torch

    from tests.parity import balanced_process

    make("qwen3_moe", tmp_path, num_hidden_layers=2, mlp_only_layers=[])
    expected = {}
    for weight in (WEIGHT, 0.0):
        model = balanced_process.adapted(tmp_path, weight)
        torch.stack([balanced_process.loss(model, rank, weight) for rank in (0, 1)]).sum().backward()
        expected[weight] = balanced_process.gradients(model)
    command = [sys.executable, "-m", "tests.parity.balanced_process", str(tmp_path)]
    processes = [subprocess.Popen([*command, str(rank), str(WEIGHT)], cwd=ROOT) for rank in (0, 1)]
    assert [process.wait(300) for process in processes] == [0, 0]
    largest = max(float(np.abs(array).max()) for array in expected[WEIGHT].values())
    for rank in (0, 1):
        with np.load(tmp_path / f"{WEIGHT}-{rank}.npz") as computed:
            assert set(computed.files) == set(expected[WEIGHT])
            for name, array in expected[WEIGHT].items():
                np.testing.assert_allclose(computed[name], array, rtol=0, atol=1e-6 * largest, err_msg=name)
    changed = max(np.abs(expected[WEIGHT][name] - array).max() for name, array in expected[0.0].items())
    assert changed > 1e-2 * largest, "the balancing loss has a part in these gradients"


@pytest.mark.e2e
def test_trl_run_with_balancing_loss_matches_train_py(tmp_path: Path) -> None:
    """Train on packed rows with recomputed layers and two micro-batches a step, each of which is a piece."""
    adapters = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}
    sections = recipe(
        {"fsdp": 1, "tp": 1},
        adapters,
        {"packing": True},
        global_batch_size=4,
        micro_batch_size=2,
        router_aux_loss_coef=WEIGHT,
    )
    case = Case("Qwen/Qwen3-30B-A3B", ["full_attention"] * 2, sections)
    here = Place(tmp_path, case, (Backend.TUNIX, Backend.TRL))
    runs, logged = [], []
    for backend, folder in ((Backend.TUNIX, "checkpoints"), (Backend.TRL, "checkpoints-trl")):
        runs.append(ComparedRun(backend.value, here.train(backend, backend.value), None))
        lines = (here.folder / backend.value / folder / "metrics.jsonl").read_text().splitlines()
        logged.append(np.array([json.loads(line)["aux_loss"] for line in lines]))
    rows = compare(runs, TOLERANCES["float32"])
    for row in rows:
        print(f"\n{row.quantity} differ by {row.difference} of {row.largest:.3g}")
    assert [row for row in rows if not row.ok] == []
    assert logged[0] == pytest.approx(logged[1], rel=1e-5)
    assert logged[0].min() > 1
