"""Tests of twenty steps of reinforcement learning against TRL's GRPOTrainer with PEFT, in float32.

Both get the same completions, adapters and rewards. TRL computes a step at once, ours in two micro-batches.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
import transformers
from transformers import AutoTokenizer

from recipec.compiler.miniature.small_checkpoint import write_tokenizer
from recipec.runtime.data.batches import TrainingData
from recipec.runtime.data.prepare import prepare
from recipec.runtime.interrupts import Interrupts
from recipec.runtime.metrics.loggers import Metrics
from recipec.runtime.model.decode import Completions
from recipec.runtime.model.sharding import Rows
from recipec.runtime.reinforcement.loss_types import LOSS_TYPES
from recipec.runtime.sections import Grpo, Log
from recipec.runtime.settings import CheckpointSettings, DataSettings, Reward, TrainSettings
from recipec.runtime.training.rollouts import Rollouts, Run
from recipec.runtime.training.trainer import Checkpointing, Trainer
from tests import tiny
from tests.runtime import training
from tests.runtime.built_models import randomize
from tests.runtime.references import split

pytestmark = pytest.mark.usefixtures("compiled_once")

STEPS, RATE = 20, 3e-4
PROMPTS, GROUP, LENGTH, LONGEST = 4, 4, 24, 12
"""Prompts of a batch, completions of each, and the most tokens of a prompt and of a completion."""
ROWS = PROMPTS * GROUP
TEMPERATURE = 0.9
HIGH = {"cispo": 1.1}
"""epsilon_high of the losses whose default does not clip these ratios."""


def completions(batch: int, end: int) -> list[list[int]]:
    """Return the completions of a batch, of different lengths; most of them end."""
    random = np.random.default_rng([batch, 1])
    out = []
    for length in random.integers(1, LONGEST + 1, ROWS):
        ids = random.integers(3, 300, length).tolist()
        out.append([*ids[:-1], end] if length < LONGEST else ids)
    return out


def reward(ids: list[int]) -> float:
    return sum(token % 7 for token in ids) / 10 - len(ids) / 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Make a folder with a model and a file of prompts, and its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny") / "llama"
    tiny.make_llama(folder, vocab_size=512, num_hidden_layers=1)
    write_tokenizer(folder, "llama")
    subjects = ("the river", "a baker", "her brother", "the old bridge", "a small boat")
    rows = [{"prompt": f"Of {subjects[i % 5]}" + "?" * (1 + i % 4), "answer": i} for i in range(2 * PROMPTS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder, AutoTokenizer.from_pretrained(folder)


class Fed:
    """A generator that returns the completions of `completions`."""

    def __init__(self, end: int) -> None:
        self.end, self.calls = end, 0

    def identity(self) -> None:
        """Return None: these completions are not stored."""

    def generate(self, prompts: Any) -> Completions:
        ids = completions(self.calls, self.end)
        self.calls += 1
        tokens = np.zeros((ROWS, LONGEST), np.int32)
        for row, values in zip(tokens, ids, strict=True):
            row[: len(values)] = values
        lengths = np.array(list(map(len, ids)), np.int32)
        ended = np.array([values[-1] == self.end for values in ids])
        return Completions(tokens, lengths, np.zeros(tokens.shape, np.float32), ended)


class Ours:
    """A run of our trainer on a mesh."""

    def __init__(self, checkpoint: tuple[Path, Any], folder: Path, grpo: Grpo, **axes: int) -> None:
        self.folder, self.grpo, self.tokenizer = folder, grpo, checkpoint[1]
        data = DataSettings(
            train=("rows.jsonl",),
            format="prompt",
            max_length=LENGTH + LONGEST,
            shuffle_seed=None,
            packing=False,
        )
        self.train = TrainSettings(
            objective="grpo",
            grpo=grpo,
            steps=STEPS,
            global_batch_size=ROWS,
            micro_batch_size=ROWS // 2 // axes["fsdp"],
            log=Log(every=STEPS),
        )
        self.prepared = prepare(data, self.train, ROWS // 2, checkpoint[1], checkpoint[0], vocabulary=512)
        self.mesh, self.built = training.build(checkpoint[0], axes, remat="none")
        randomize(self.built, scale=0.02)
        self.start = split(self.built)

    def go(self) -> list[dict[str, Any]]:
        """Train to the end, and return the metrics of each step."""
        rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE, weight_decay=0.01))
        how = CheckpointSettings(str(self.folder), every_steps=STEPS, keep=1)
        with self.mesh:
            trainer = Trainer(
                self.built, rule, self.train, self.mesh, 2, Checkpointing(str(self.folder), how)
            )
            metrics = Metrics(self.folder, None, tensorboard=False)
            rows = Rows.of(self.mesh, self.prepared.rows)
            schedule: Any = self.prepared.schedule
            fed: Any = Fed(self.tokenizer.eos_token_id)
            rollouts = Rollouts(
                schedule,
                self.grpo,
                fed,
                ([Reward("sevens", file="rewards.py")], lambda _, __, ids, ___: [list(map(reward, ids))]),
                self.tokenizer.decode,
                rows,
                Run(0, trainer, str(self.folder), self.prepared.state, metrics),
            )
            data = TrainingData(
                rollouts.batches, tokens=rollouts.tokens_of, rows=rows, numbers=rollouts.numbers
            )
            try:
                trainer.fit(data, STEPS, lambda step: RATE, metrics, Interrupts())
            finally:
                metrics.close()
                trainer.close()
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


def by_trl(checkpoint: tuple[Path, Any], start: Any, folder: Path, grpo: Grpo) -> tuple[Any, dict[str, Any]]:
    """Return the losses, norms and divergences of TRL's steps, and its adapters."""
    import peft
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    folder_of_model, tokenizer = checkpoint
    config = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules=list(training.TARGETS), task_type="CAUSAL_LM"
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(folder_of_model, dtype=torch.float32)
    level = grpo.ratio or LOSS_TYPES[grpo.loss].ratio
    arguments = GRPOConfig(
        output_dir=str(folder),
        loss_type="grpo" if grpo.loss == "gspo" else grpo.loss,
        importance_sampling_level=level,
        num_generations=GROUP,
        num_iterations=grpo.iterations,
        beta=grpo.beta,
        epsilon=grpo.epsilon,
        epsilon_high=grpo.epsilon_high,
        mask_truncated_completions=grpo.mask_truncated,
        temperature=TEMPERATURE,
        max_completion_length=LONGEST,
        shuffle_dataset=False,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=1,
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    calls = itertools.count()

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [tokenizer(prompt).input_ids for prompt in prompts]
        return {
            "prompt_ids": ids,
            "completion_ids": completions(next(calls), tokenizer.eos_token_id),
            "logprobs": None,
        }

    trainer = GRPOTrainer(
        peft.get_peft_model(base, config),
        reward_funcs=lambda completion_ids, **_: list(map(reward, completion_ids)),
        args=arguments,
        train_dataset=Dataset.from_json(str(folder_of_model / "rows.jsonl")),
        processing_class=tokenizer,
        rollout_func=rollout,
    )
    weights = {
        name[name.index("layers.") :].removesuffix(".default.weight"): parameter
        for name, parameter in trainer.model.named_parameters()
        if "lora_" in name and ".default." in name
    }
    with torch.no_grad():
        for name, pair in start.items():
            for letter, value in zip("AB", pair, strict=True):
                weights[f"{name}.lora_{letter}"].copy_(torch.tensor(value))
    losses = []
    original = trainer.training_step

    def step(*given: Any, **options: Any) -> Any:
        loss = original(*given, **options)
        losses.append(float(loss))
        return loss

    trainer.training_step = step
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {
        "loss": losses,
        "grad_norm": [entry["grad_norm"] for entry in logged],
        "reward": [entry["reward"] for entry in logged if "reward" in entry],
        "kl": [entry["kl"] for entry in logged] if grpo.beta else [],
    }, weights


ONE, FOUR = {"fsdp": 1, "tp": 1}, {"fsdp": 2, "tp": 2}
ALL = [name for name in LOSS_TYPES if name != "rloo"]


def case(loss: str, iterations: int, beta: float, axes: dict[str, int], mark: Any = (), **more: Any) -> Any:
    name = f"{loss}-{iterations}-{beta:g}-{'x'.join(map(str, axes.values()))}" + "".join(more)
    return pytest.param(loss, iterations, beta, axes, more, marks=mark, id=name)


@pytest.mark.parametrize(
    ("loss", "iterations", "beta", "axes", "more"),
    [
        case("dapo", 3, 0.04, FOUR),
        *(case(loss, 3, 0.04, ONE, pytest.mark.e2e) for loss in ("grpo", "gspo", "cispo")),
        case("dapo", 1, 0.0, ONE, pytest.mark.e2e, mask_truncated=True),
        *(
            case(loss, iterations, beta, axes, pytest.mark.nightly)
            for loss, iterations, beta, axes in itertools.product(ALL, (1, 3), (0.0, 0.04), (ONE, FOUR))
        ),
    ],
)
def test_twenty_steps_match_trl(
    loss: str,
    iterations: int,
    beta: float,
    axes: dict[str, int],
    more: dict[str, Any],
    checkpoint: tuple[Path, Any],
    tmp_path: Path,
) -> None:
    grpo = Grpo(
        num_generations=GROUP,
        iterations=iterations,
        loss=loss,
        beta=beta,
        max_prompt_length=LENGTH,
        max_completion_length=LONGEST,
        temperature=TEMPERATURE,
        epsilon_high=HIGH.get(loss),
        **more,
    )
    with jax.default_matmul_precision("highest"):
        run = Ours(checkpoint, tmp_path / "ours", grpo, **axes)
        entries = run.go()
    expected, weights = by_trl(checkpoint, run.start, tmp_path / "trl", grpo)
    moved = split(run.built)
    apart = max(
        np.abs(moved[name.rpartition(".lora_")[0]]["AB".index(name[-1])] - value.detach().numpy()).max()
        for name, value in weights.items()
    )
    pairs = [(moved[name], run.start[name]) for name in moved]
    far = max(np.abs(a - b).max() for now, before in pairs for a, b in zip(now, before, strict=True))
    loss_apart, norm_apart = (
        np.abs(np.array([entry[name] for entry in entries]) - expected[name]).max()
        for name in ("loss", "grad_norm")
    )
    print(
        f"\n{loss} {iterations} {beta} {axes}: losses differ by {loss_apart:.1e}, norms of gradients by "
        f"{norm_apart:.1e} of {max(expected['grad_norm']):.2f}, adapters by {apart:.1e} of {far:.1e}; "
        f"clipped {max(entry['clip_high'] for entry in entries):.2f}"
    )
    assert len(entries) == STEPS
    assert loss_apart <= 1e-5 * max(1, *np.abs(expected["loss"]))
    assert norm_apart <= 1e-5 * max(1, *expected["grad_norm"])
    assert apart <= 1e-5
    assert far > 1e-3
    for entry, value in zip(entries, expected["kl"], strict=False):
        assert entry["kl"] == pytest.approx(value, rel=1e-4, abs=1e-5)
    for entry, value in zip(entries[::iterations], expected["reward"], strict=True):
        assert entry["reward"] == pytest.approx(value, abs=1e-5)
