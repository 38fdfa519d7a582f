"""Tests of `recipe diff`: the changes, in words and in files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipec.compiler.cli.main import app
from recipec.compiler.explain.diff import diff
from recipec.compiler.lower import Lowered


@pytest.fixture
def changed(lowered: Callable[..., Lowered]) -> Callable[..., str]:
    """Return a function that describes the difference of `--set` arguments, with others that both have."""

    def run(*sets: str, both: tuple[str, ...] = (), artifact: bool = True) -> str:
        before, after = lowered(*both).program, lowered(*both, *sets).program
        assert before is not None and after is not None
        return diff(before, after, artifact)

    return run


def test_equal_recipes_have_no_differences(changed: Callable[..., str]) -> None:
    assert changed() == "nothing changes\n"


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["train.global_batch_size=16"],
         ["global batch 8 -> 16 rows", "32,768 -> 65,536 tokens a step (2x)", "micro-batches a step 2 -> 4"]),
        (["mesh.axes={fsdp: 2, tp: 2}"], ["data-parallel devices (fsdp) 4 -> 2", "split over 1 device (tp)"]),
        (["lora.rank=32"], ["trained parameters 489,717,760 -> 244,858,880 (0.5x)"]),
        (["lora.targets=[q_proj, v_proj]"], ["k_proj loses its adapter in each of its 60 layers"]),
        (["model.id=google/gemma-3-27b-it"], ["another model: Gemma 4 31B -> Gemma 3 27B"]),
        (["train.steps=100"], ["length 1 epoch -> 100 steps"]),
        (["train.optimizer={learning_rate: 2e-4, max_grad_norm: 0.5, b1: 0.8}"],
         ["peak learning rate 0.0001 -> 0.0002 (2x)", "clipped to norm 1 -> 0.5",
          "the optimizer's b1 0.9 -> 0.8"]),
        (["train.schedule={name: linear, warmup_steps: 0}"],
         ["schedule cosine to 0 of the peak, warm-up 0.03 of the steps -> linear", "warm-up none"]),
        (["data.packing=false", "data.loss_on=all", "data.max_length=2048"],
         ["each sample is padded", "loss on assistant -> all", "left out above 4,096 -> 2,048 tokens"]),
        (["data.eval_fraction=0.05", "data.train[0].limit=1000"],
         ["held out of the training rows to evaluate on: none -> 0.05", "all -> 1,000"]),
        (["train={objective: dpo, loss_type: ipo}", "data.format=preference", "data.packing=false",
          "data.loss_on=completion"],
         ["learned with sft -> dpo, beta 0.1, loss_type ipo"]),
        (["serve={}"], ["served on v6e-8"]),
        (["train.optimizer={name: sgd, momentum: 0.9}"],
         ["the optimizer's name adamw -> sgd", "the optimizer's momentum 0.0 -> 0.9"]),
        (["xla.profile=none"], ["compiled with other flags of libtpu"]),
        (["sharding.rules=[{match: '.*down_proj.kernel', spec: [fsdp, tp]}]"],
         ["60 parameters sharded another way: layers.*.mlp.down_proj.kernel"]),
        (["model.dtype=float32", "lora.dtype=bfloat16", "lora.kv=shared", "remat.policy=block"],
         ["computation in bfloat16 -> float32", "optimizer state in float32 -> bfloat16",
          "key and value adapters are independent -> shared",
          "in the backward pass: save_dots -> block"]),
        (["train.qat={group_size: 64, start_step: 9}"],
         ["rounded in training: nothing -> weights to int4 in groups of 64", "to int8, from step 10"]),
        (["model.quantization=int8", "model.quantized_matmul=forward"],
         ["frozen weights stored in bfloat16 -> int8",
          "products with frozen weights in bfloat16 -> int8, backward in bfloat16"]),
    ],
)  # fmt: skip
def test_diff_describes_each_change_in_words(
    changed: Callable[..., str], sets: list[str], words: list[str]
) -> None:
    text = changed(*sets)
    for phrase in words:
        assert phrase in text
    assert text.index("In the run:") < text.index("In the recipe:") < text.index("In the artifact:")
    trains_otherwise = not sets[0].startswith("serve")
    assert ("--- example/train.py\n+++ example/train.py\n" in text) is trains_otherwise


def test_added_or_removed_section_is_shown_with_its_values(changed: Callable[..., str]) -> None:
    text = changed("serve={port: 9000}")
    assert "  serve.port: (none) -> 9000\n" in text
    assert "--- /dev/null\n+++ example/serve/Dockerfile\n" in text
    gone = changed("serve=null", both=("serve={}",))
    assert "no longer served" in gone and "  serve.port: 8000 -> (none)\n" in gone


def test_lines_of_the_artifact_are_shown_only_on_request(changed: Callable[..., str]) -> None:
    text = changed("train.seed=7", artifact=False)
    assert "  train.py: changed\n" in text and "--artifact" in text and len(text.splitlines()) < 20
    assert "serve/Dockerfile: new\n" in changed("serve={}", artifact=False)
    assert "recipe.lock.json" not in changed("train.seed=7")


def test_changed_name_is_reported_as_no_change_in_the_run(changed: Callable[..., str]) -> None:
    text = changed("name=other")
    assert text.startswith("Nothing changes in the run.\n")
    assert "  name: example -> other\n" in text
    assert "Nothing changes in the run.\n" not in changed("merge.max_shard_size=1GB")


def test_set_option_applies_only_to_the_second_of_two_equal_recipes(root: Path) -> None:
    recipe = str(root / "recipes" / "gemma3-270m-cpu.yaml")
    out = CliRunner().invoke(app, ["diff", recipe, recipe, "--set", "train.seed=7"]).output
    assert "train.seed: 0 -> 7" in out
    other = str(root / "recipes" / "gemma3-12b-v5e8.yaml")
    assert (
        "train.seed" not in CliRunner().invoke(app, ["diff", recipe, other, "--set", "train.seed=7"]).output
    )
