"""Tests of twenty steps of reinforcement learning in float32 against TRL's GRPOTrainer with PEFT, and against
the trainer of train_trl.py.

All get the same completions, adapters and rewards. TRL alone computes a step at once, the others in two
micro-batches.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
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
from recipec.runtime.model.adapters import LoraSettings
from recipec.runtime.model.decode import Completions
from recipec.runtime.model.sharding import Rows
from recipec.runtime.reinforcement.asked import Prompts
from recipec.runtime.reinforcement.loss_types import LOSS_TYPES
from recipec.runtime.sections import Grpo, Log, RewardLimits
from recipec.runtime.settings import CheckpointSettings, DataSettings, ModelSettings, Reward, TrainSettings
from recipec.runtime.training.rollouts import Rollouts, Run
from recipec.runtime.training.trainer import Checkpointing, Trainer
from recipec.runtime.weights.checkpoint import HFCheckpoint
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
        self.data = data = DataSettings(
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
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    folder_of_model, tokenizer = checkpoint
    config = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules=list(training.TARGETS), task_type="CAUSAL_LM"
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(folder_of_model, dtype=torch.float32)
    level = grpo.ratio or LOSS_TYPES[grpo.loss].ratio
    leave_one_out = grpo.loss == "rloo"
    of_loss: dict[str, Any] = {"normalize_advantages": grpo.scale_rewards == "batch"}
    if not leave_one_out:
        loss = "grpo" if grpo.loss == "gspo" else grpo.loss
        of_loss = {"loss_type": loss, "importance_sampling_level": level}
    arguments = (RLOOConfig if leave_one_out else GRPOConfig)(
        output_dir=str(folder),
        **of_loss,
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

    def fed(trainer: Any, *_: Any, **__: Any) -> Any:
        ids = completions(next(calls), tokenizer.eos_token_id)
        return ids if leave_one_out else (ids, None)

    trainer_type = RLOOTrainer if leave_one_out else GRPOTrainer
    trainer = type("Fed", (trainer_type,), {"_generate_single_turn": fed})(
        peft.get_peft_model(base, config),
        reward_funcs=lambda completion_ids, **_: list(map(reward, completion_ids)),
        args=arguments,
        train_dataset=Dataset.from_json(str(folder_of_model / "rows.jsonl")),
        processing_class=tokenizer,
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
        "kl": [entry["kl"] for entry in logged if "kl" in entry],
    }, weights


SEVENS = """
def sevens(completion_ids, answer, **columns):
    return [sum(token % 7 for token in ids) / 10 - len(ids) / 6 for ids in completion_ids]
"""
"""`reward`, as a recipe's function."""


def by_script(checkpoint: tuple[Path, Any], run: Ours, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the same as `by_trl`, of train_trl.py's trainer with the settings of `run`."""
    from recipec.runtime.backends.peft_model import set_adapters, trained_parameters
    from recipec.runtime.backends.trl.grpo_trainer import RewardTrainer, grpo_settings, reward_functions
    from recipec.runtime.backends.trl.recipe_loop import Surroundings, Training
    from recipec.runtime.backends.trl.start import TrlSettings, trainable_model, trainer_settings

    class Patched(RewardTrainer):
        calls = 0

        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            assert len(prompt_ids) == ROWS and all(map(len, prompt_ids))
            self.calls += 1
            return completions(self.calls - 1, run.tokenizer.eos_token_id), None

    base = HFCheckpoint.open(checkpoint[0])
    lora = LoraSettings(rank=4, alpha=8.0, dropout=0.0, targets=training.TARGETS)
    model = ModelSettings(id="tiny", family="llama", dtype="float32", remat="none")
    how = CheckpointSettings(str(folder), every_steps=STEPS, keep=1)
    settings = TrlSettings(model, lora, run.data, run.train, how, ROWS // 2, 1.0, False)
    whole = trainable_model(base, settings, None)
    (folder.parent / "rewards.py").write_text(SEVENS)
    found: dict[str, list[float]] = {"loss": [], "grad_norm": [], "reward": [], "kl": []}

    def done(step: int, numbers: dict[str, float], more: dict[str, float]) -> None:
        found["loss"].append(numbers["loss"])
        found["grad_norm"].append(numbers["norm"])
        for name in {"reward", "kl"} & {*more}:
            found[name].append(more[name])

    ends, schedule = [run.tokenizer.eos_token_id], run.prepared.schedule
    common = trainer_settings(settings, folder, 2, STEPS, True)
    common |= {"per_device_train_batch_size": ROWS // 2}
    rewards = (Reward("sevens", file=str(folder.parent / "rewards.py")),)
    prompts = Prompts(run.prepared.samples)
    with reward_functions(rewards, RewardLimits(), run.grpo, prompts, run.tokenizer.decode) as functions:
        arguments = grpo_settings(
            replace(settings, train=replace(run.train, micro_batch_size=ROWS // 2)), common, ends, None
        )
        trainer = Patched(
            whole,
            arguments,
            run.tokenizer,
            (schedule, ends),
            functions,
            Training(
                start=0,
                optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.01),
                schedule=lambda rule: torch.optim.lr_scheduler.LambdaLR(rule, lambda step: 1.0),
                parameters=lambda whole: trained_parameters(whole, base, lora, ()),
                reference=None,
                eval_every=STEPS,
                loraplus_lr_ratio=None,
                keep_first=False,
            ),
            Surroundings(run.prepared.state, done, lambda *_: None, lambda: False),
        )
        set_adapters(whole, base, run.start)  # now, because the reference begins at fresh adapters
        trainer.go(None)
    return found, trainer.trained()


ONE, FOUR = {"fsdp": 1, "tp": 1}, {"fsdp": 2, "tp": 2}
ALL = list(LOSS_TYPES)


def case(loss: str, iterations: int, beta: float, axes: dict[str, int], mark: Any = (), **more: Any) -> Any:
    name = f"{loss}-{iterations}-{beta:g}-{'x'.join(map(str, axes.values()))}" + "".join(more)
    return pytest.param(loss, iterations, beta, axes, more, marks=mark, id=name)


@pytest.mark.parametrize(
    ("loss", "iterations", "beta", "axes", "more"),
    [
        case("dapo", 3, 0.04, FOUR),
        case("gspo", 3, 0.04, ONE, pytest.mark.e2e),
        case("dapo", 1, 0.0, ONE, pytest.mark.e2e, mask_truncated=True),
        case("rloo", 2, 0.05, FOUR, pytest.mark.e2e),
        case("rloo", 1, 0.05, ONE, pytest.mark.nightly, scale_rewards="batch"),
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
        **{**({"scale_rewards": "none"} if loss == "rloo" else {}), **more},
    )
    with jax.default_matmul_precision("highest"):
        run = Ours(checkpoint, tmp_path / "ours", grpo, **axes)
        entries = run.go()
    check("TRL", run, entries, *by_trl(checkpoint, run.start, tmp_path / "trl", grpo))
    # TRL has rloo in another trainer, and takes bnpo's mean over each of the script's micro-batches.
    if loss not in ("rloo", "bnpo"):
        check("train_trl.py", run, entries, *by_script(checkpoint, run, tmp_path / "script"))


def check(
    whose: str, run: Ours, entries: list[dict[str, Any]], expected: dict[str, Any], weights: dict[str, Any]
) -> None:
    """Compare our run's numbers and adapters with another one's."""
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
        f"\n{whose}, {run.grpo.loss}: losses differ by {loss_apart:.1e}, norms of gradients by "
        f"{norm_apart:.1e} of {max(expected['grad_norm']):.2f}, adapters by {apart:.1e} of {far:.1e}; "
        f"clipped {max(entry['clip_high'] for entry in entries):.2f}"
    )
    assert len(entries) == STEPS
    assert loss_apart <= 1e-5 * max(1, *np.abs(expected["loss"]))
    # In later iterations rloo's ratio is exp of a sum over tokens, which rounds as much as all of them. The
    # first step of each batch, with ratios of 1, is as close as with the other losses.
    again = run.grpo.loss == "rloo" and run.grpo.iterations > 1
    assert norm_apart <= (3e-5 if again else 1e-5) * max(1, *expected["grad_norm"])
    assert apart <= 1e-5
    assert far > 1e-3
    divergences = [entry["kl"] for entry in entries if "kl" in entry]
    if whose == "TRL":  # of several micro-batches, TRL reports the mean of their means
        assert divergences == pytest.approx(expected["kl"], rel=1e-4, abs=1e-5)
    assert len(divergences) == len(expected["kl"]) and bool(divergences) == bool(run.grpo.beta)
    for entry, value in zip(entries[:: run.grpo.iterations], expected["reward"], strict=True):
        assert entry["reward"] == pytest.approx(value, abs=1e-5)
