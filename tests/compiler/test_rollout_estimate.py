"""Tests of the memory that rollouts need by calculation, and of the layout that the compiler chooses."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipec.compiler.lower import lower
from recipec.compiler.lowering.program import Program
from recipec.compiler.roofline.rollout import cache_bytes, kept_bytes, rollout_need, weights_bytes
from recipec.compiler.roofline.step_estimate import need
from recipec.spec.diagnostics import render_text
from recipec.spec.load import load

RECIPE = """\
recipe: 1
name: sample
model: {id: Qwen/Qwen3-8B}
mesh: {accelerator: v6e-8, axes: {fsdp: 8}}
lora: {rank: 16}
data: {train: [gs://bucket/prompts.jsonl], format: prompt}
train:
  objective: grpo
  global_batch_size: 512
  steps: 200
  grpo: {max_prompt_length: 256, max_completion_length: 1024}
rewards: [{length: {maximum: 100}}]
"""


def program(folder: Path, *sets: str) -> Program:
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    lowered = lower(load(folder / "recipe.yaml", sets))
    assert lowered.program is not None, render_text(lowered.diagnostics)
    return lowered.program


def test_memory_of_qwen3_8b_by_hand(tmp_path: Path) -> None:
    """8,190,735,360 weights of two bytes on eight devices; keys and values of 36 layers, 8 heads of 128."""
    qwen, tp = program(tmp_path), {"fsdp": 1, "tp": 8}
    slots = 512 * 1280
    assert cache_bytes(qwen, tp) == slots * 36 * 2 * 8 * 128 * 2 / 8
    assert cache_bytes(qwen, {"fsdp": 8, "tp": 1}) == cache_bytes(qwen, tp)
    assert cache_bytes(program(tmp_path, "rollout.rows=64"), tp) == cache_bytes(qwen, tp) / 8
    assert weights_bytes(qwen, tp) == 8_190_735_360 * 2 / 8
    # tp 16 does not divide the eight heads of keys and values
    assert cache_bytes(qwen, {"tp": 16}) == 8 * cache_bytes(qwen, tp)


def test_layout_is_chosen_for_weights_that_fsdp_splits(tmp_path: Path) -> None:
    chosen = program(tmp_path)
    assert chosen.recipe.rollout.axes == {"fsdp": 1, "tp": 8}
    assert "fsdp 1 x tp 8" in chosen.automatic["rollout.axes"]
    assert "axes" not in chosen.recipe.rollout.model_fields_set
    # A single head of keys and values does not limit tp; four of them do.
    gemma = program(tmp_path, "model.id=google/gemma-3-4b-it")
    assert gemma.recipe.rollout.axes == {"fsdp": 2, "tp": 4}
    assert program(tmp_path, "rollout.axes={fsdp: 4, tp: 2}").recipe.rollout.axes == {"fsdp": 4, "tp": 2}
    own = program(tmp_path, "mesh.axes={tp: 8}")
    assert own.recipe.rollout.axes is None and "rollout.axes" not in own.automatic
    assert program(tmp_path, "mesh.axes={fsdp: 4, cp: 2}").recipe.rollout.axes == {"fsdp": 1, "tp": 8}
    cpu = ("mesh={accelerator: cpu-8, axes: {fsdp: 8}}", "model.dtype=float32")
    assert program(tmp_path, *cpu).recipe.rollout.axes is None


def test_second_copy_of_frozen_weights_counts_in_the_update(tmp_path: Path) -> None:
    copied, own = program(tmp_path), program(tmp_path, "rollout.axes={fsdp: 8}")
    weights = weights_bytes(copied, {"fsdp": 1, "tp": 8})
    assert (kept_bytes(copied), kept_bytes(own)) == (weights, 0)
    assert need(copied).state - need(own).state == pytest.approx(weights)
    assert rollout_need(own).weights == 0 and rollout_need(copied).weights == weights
    # All weights are handed over before each rollout, so no copy stays.
    full = program(tmp_path, "lora=null", "train.optimizer.name=sgd")
    assert kept_bytes(full) == 0
