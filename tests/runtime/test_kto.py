"""Tests of KTO against TRL's KTOTrainer with PEFT, in float32: twenty steps, and an evaluation."""

from __future__ import annotations

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
from recipec.runtime.errors import UserError
from recipec.runtime.interrupts import Interrupts
from recipec.runtime.metrics.loggers import Metrics
from recipec.runtime.sections import Log
from recipec.runtime.settings import CheckpointSettings, DataSettings, TrainSettings
from recipec.runtime.training.objective_losses import kto_loss
from recipec.runtime.training.trainer import Checkpointing, Trainer
from tests import tiny
from tests.backends.test_trl_preference import Table, logps
from tests.runtime import training
from tests.runtime.built_models import randomize
from tests.runtime.references import split

pytestmark = pytest.mark.usefixtures("compiled_once")
"""The runs are the same program."""

STEPS, RATE, BETA = 20, 1e-3, 0.1
WEIGHTS = {"desirable_weight": 0.8, "undesirable_weight": 1.3}
ROWS, MICRO, LENGTH = 23, 4, 64
"""An epoch's last micro-batch has three rows, of which the last one has no partner."""


def rows() -> list[dict[str, Any]]:
    """Make rows with answers of different lengths. The second micro-batch has no undesirable answer."""
    subjects = ("the river", "a baker", "her brother", "the old bridge", "a small boat")
    return [
        {
            "prompt": f"What of {subjects[i % 5]} on day {i * 37 % 101}" + "?" * (1 + i % 4),
            "completion": f" {subjects[i * 3 % 5]} rests." + " It sings." * (i * 7 % 4),
            "label": 4 <= i < 8 or i % 3 > 0,
        }
        for i in range(ROWS)
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Make a folder with a model and a file of rows, and its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny") / "llama"
    tiny.make_llama(folder, vocab_size=512, num_hidden_layers=1)
    write_tokenizer(folder, "llama")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return folder, AutoTokenizer.from_pretrained(folder)


def trl_trainer(
    checkpoint: tuple[Path, Any], start: Any, together: int, folder: Path, loss_type: str
) -> tuple[Any, dict[str, Any]]:
    """Return TRL's trainer, with adapters that have our initial values.

    Args:
        together: the rows that one process pairs with one another. Several processes may compute a
            micro-batch together; here one process does, with the same means.
    """
    import peft
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    config = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules=list(training.TARGETS), task_type="CAUSAL_LM"
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint[0], dtype=torch.float32)
    arguments = KTOConfig(
        output_dir=str(folder),
        loss_type=loss_type,
        beta=BETA,
        **WEIGHTS,
        max_length=LENGTH,
        per_device_train_batch_size=together,
        per_device_eval_batch_size=MICRO,
        gradient_accumulation_steps=2,
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
    data = Dataset.from_list(rows())
    trainer = KTOTrainer(
        peft.get_peft_model(base, config),
        args=arguments,
        train_dataset=data,
        eval_dataset=data,
        processing_class=checkpoint[1],
    )
    trainer._train_batch_size = arguments.per_device_train_batch_size = MICRO
    weights = {
        name[name.index("layers.") :].removesuffix(".default.weight"): parameter
        for name, parameter in trainer.model.named_parameters()
        if "lora_" in name and ".default." in name
    }
    with torch.no_grad():
        for name, pair in start.items():
            for letter, value in zip("AB", pair, strict=True):
                weights[f"{name}.lora_{letter}"].copy_(torch.tensor(value))
    return trainer, weights


def by_trl(trainer: Any) -> tuple[dict[str, Any], float]:
    """Return the losses and distances of a run's steps, and the last evaluation."""
    found: dict[str, list[float]] = {"loss": [], "kl": []}
    original = trainer.training_step

    def step(*given: Any, **options: Any) -> Any:
        loss = original(*given, **options)
        found["loss"].append(float(loss) * 2)
        found["kl"].append(trainer._metrics["train"]["kl"][-1])
        return loss

    trainer.training_step = step
    trainer.train()
    means = {name: np.array(values).reshape(STEPS, 2).mean(1) for name, values in found.items()}
    return means, trainer.evaluate()["eval_loss"]


class Run:
    """A run of our trainer on a mesh."""

    def __init__(self, checkpoint: tuple[Path, Any], folder: Path, loss_type: str, **axes: int) -> None:
        self.folder, self.axes = folder, axes
        data = DataSettings(
            train=("rows.jsonl",),
            eval=("rows.jsonl",),
            format="unpaired_preference",
            loss_on="completion",
            max_length=LENGTH,
            shuffle_seed=None,
            packing=False,
        )
        self.train = TrainSettings(
            objective="kto",
            loss_type=loss_type,
            beta=BETA,
            **WEIGHTS,
            steps=STEPS,
            global_batch_size=2 * MICRO,
            micro_batch_size=MICRO // axes["fsdp"],
            loss_normalization="micro_batches",
            eval_every=STEPS,
            log=Log(every=STEPS),
        )
        self.prepared = prepare(data, self.train, MICRO, checkpoint[1], checkpoint[0], vocabulary=512)
        self.mesh, self.built = training.build(checkpoint[0], axes, remat="none")
        randomize(self.built, scale=0.1)
        self.start = split(self.built)

    def go(self) -> None:
        """Train to the end."""
        rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE, weight_decay=0.01))
        how = CheckpointSettings(str(self.folder), every_steps=STEPS, keep=1)
        with self.mesh:
            trainer = Trainer(
                self.built, rule, self.train, self.mesh, 2, Checkpointing(str(self.folder), how)
            )
            metrics = Metrics(self.folder, None, tensorboard=False)
            data = TrainingData(lambda step: self.prepared.batches(start=step), self.prepared.evaluation())
            try:
                trainer.fit(data, STEPS, lambda step: RATE, metrics, Interrupts())
            finally:
                metrics.close()
                trainer.close()

    def logged(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("loss_type", "axes"),
    [
        pytest.param("kto", {"fsdp": 2, "tp": 2}, marks=pytest.mark.e2e),
        pytest.param("kto", {"fsdp": 1, "tp": 1}, marks=pytest.mark.nightly),
        pytest.param("apo_zero_unpaired", {"fsdp": 2, "tp": 2}, marks=pytest.mark.nightly),
    ],
    ids=["kto-fsdp2-tp2", "kto-one-device", "apo"],
)
def test_twenty_kto_steps_match_trl(
    loss_type: str, axes: dict[str, int], checkpoint: tuple[Path, Any], tmp_path: Path
) -> None:
    """Cover accumulation, rows of only one kind, a partial last micro-batch, and an evaluation."""
    with jax.default_matmul_precision("highest"):
        run = Run(checkpoint, tmp_path / "ours", loss_type, **axes)
        run.go()
    trainer, weights = trl_trainer(checkpoint, run.start, MICRO // axes["fsdp"], tmp_path / "trl", loss_type)
    means, evaluated = by_trl(trainer)
    steps = [entry for entry in run.logged() if "loss" in entry]
    found, kl = ([entry[name] for entry in steps] for name in ("loss", "kl"))
    last = [entry["eval_loss"] for entry in run.logged() if "eval_loss" in entry][-1]
    moved = split(run.built)
    apart = max(
        np.abs(moved[name.rpartition(".lora_")[0]]["AB".index(name[-1])] - value.detach().numpy()).max()
        for name, value in weights.items()
    )
    pairs = [(moved[name], run.start[name]) for name in moved]
    far = max(np.abs(a - b).max() for now, before in pairs for a, b in zip(now, before, strict=True))
    print(
        f"\n{loss_type} {axes}: losses differ by {np.abs(found - means['loss']).max():.1e} of "
        f"{max(found):.2f}, kl by {np.abs(kl - means['kl']).max():.1e} of {max(kl):.2f}, the evaluation by "
        f"{abs(last - evaluated):.1e}, adapters by {apart:.1e}, which moved by {far:.1e}"
    )
    assert len(found) == STEPS
    assert np.abs(found - means["loss"]).max() <= 1e-5
    assert abs(last - evaluated) <= 1e-5
    assert apart <= 1e-3 * far
    assert (max(kl) > 0.1) == (loss_type == "kto")


def test_two_process_kto_pieces_sum_to_whole_micro_batch_loss(
    checkpoint: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sum the pieces of two processes to train.py's loss and metrics, also in a partial step."""

    from recipec.runtime.backends.trl.pieces import Pieces
    from recipec.runtime.backends.trl.trl_objectives import objective_of

    run = Run(checkpoint, tmp_path / "ours", "kto", fsdp=2, tp=2)
    table, objective = Table(7), objective_of(run.train)
    made = [Pieces(run.prepared, run.train, process, 2) for process in range(2)]
    told: list[Any] = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)

    def together(distance: Any) -> None:
        """Record each process's value, and return the sum after all have been asked."""
        told.append(distance.clone())
        if len(told) > 2:
            distance.copy_(told[0] + told[1])

    monkeypatch.setattr(torch.distributed, "all_reduce", together)
    policy, before = logps(table.policy), logps(table.reference)
    whole = jax.jit(lambda batch: kto_loss(policy, policy, before, batch, run.train))
    for part in range(2 * run.prepared.steps_per_epoch):
        loss, metrics = whole(run.prepared.micro_batch(part))
        expected = {"loss": float(loss), **{name: float(value) for name, value in metrics.items()}}
        told.clear()
        for _ in range(2):
            sums: dict[str, float] = {}
            for one in made:
                piece = {name: torch.from_numpy(array) for name, array in one.of(part).items()}
                value, more = objective(table, table, piece)
                for name, number in {"loss": value, **more}.items():
                    sums[name] = sums.get(name, 0.0) + 2 * float(number)
        assert sums == pytest.approx(expected, rel=1e-5, abs=1e-6)
    with pytest.raises(UserError, match="4 rows of a micro-batch at once"):
        Pieces(run.prepared, run.train, 0, 3)
