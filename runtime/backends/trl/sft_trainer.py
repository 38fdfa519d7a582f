"""TRL's SFTTrainer with a recipe's own micro-batches, losses and position in the data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer
from trl.trainer.utils import add_fused_lm_head

from ...data.batches import Batch, eval_losses
from ...sections import EarlyStopping
from ...training.early_stopping import Evaluations
from .pieces import Pieces
from .trl_checkpoints import DATA, TRAINED
from .trl_objectives import Objective

Numbers = dict[str, float]


@dataclass(frozen=True)
class Training:
    """The training settings of a model.

    Attributes:
        start: number of completed optimizer steps.
        optimizer: makes the optimizer of the trained parameters.
        schedule: makes the optimizer's learning rate schedule.
        parameters: returns a model's trained parameters by a trace's names.
        reference: the model that training starts from; None if that is the model without its adapters.
        eval_every: optimizer steps between evaluations, if there is evaluation data.
        loraplus_lr_ratio: LoRA+'s factor of B's learning rate; None to use A's.
        keep_first: whether to keep the trained values before the first step, and that step's gradients.
        stopping: the rule for ending before the last step; None for no rule.
        before: the state of early stopping at `start`.
    """

    start: int
    optimizer: Callable[[list[Any]], Optimizer]
    schedule: Callable[[Optimizer], LRScheduler]
    parameters: Callable[[Any], dict[str, Any]]
    reference: Any
    eval_every: int
    loraplus_lr_ratio: float | None
    keep_first: bool
    stopping: EarlyStopping | None = None
    before: Evaluations = field(default_factory=Evaluations)


@dataclass(frozen=True)
class Surroundings:
    """The callbacks that connect a trainer to its run.

    Attributes:
        state: returns the position in the data after an optimizer step, for the checkpoint.
        done: called on each process after an optimizer step, with its number, counted from 1, with its loss,
            learning_rate, norm (of the gradient before clipping), tokens and targets, and with the
            objective's other numbers.
        evaluated: called with an optimizer step and the result of `runtime.data.batches.eval_losses`.
        stop: returns whether this process asks to end the run.
    """

    state: Callable[[int], Mapping[str, Any]]
    done: Callable[[int, Numbers, Numbers], None]
    evaluated: Callable[[int, Numbers], None]
    stop: Callable[[], bool]


class RecipeTrainer(SFTTrainer):
    """Trains a model on tokenized and packed micro-batches, in the order of the recipe.

    TRL and accelerate do not shuffle, pad or split them: the data set holds only the numbers of the pieces
    that each process computes, and each process builds its own rows of a piece.

    Args:
        model: with its adapters, or with all of its text weights trainable.
        args: with max_steps, gradient_accumulation_steps and so on.
        pieces: the data, cut for this process.
        objective: the loss of a piece.
        training: the training settings.
        around: the callbacks of the run.

    Attributes:
        first_values: the trained values before the first step, in float32; None before that, or if not kept.
        first_gradients: of that step, before clipping, in float32; None before that, or if not kept.
    """

    model: Any
    control: Any
    optimizer: Any
    lr_scheduler: Any
    model_accepts_loss_kwargs: Any

    def __init__(
        self,
        model: Any,
        args: SFTConfig,
        tokenizer: Any,
        pieces: Pieces,
        objective: Objective,
        training: Training,
        around: Surroundings,
    ) -> None:
        start = training.start
        self._objective, self._training, self._around = objective, training, around
        self._held_out, self._parts = pieces.evaluation(), pieces.eval_parts
        self._stopping: Stopping | None = None
        self._sums: Numbers = {}
        self._norm = 0.0
        self.first_values: dict[str, np.ndarray] | None = None
        self.first_gradients: dict[str, np.ndarray] | None = None
        parameters = {name: p.data for name, p in model.named_parameters() if p.requires_grad}
        accumulation = args.gradient_accumulation_steps
        # At least one step's numbers, even if nothing is left to do, because TRL looks at the first row.
        numbers = range(start * accumulation, max(args.max_steps, start + 1) * accumulation)
        super().__init__(
            model=model,
            args=args,
            data_collator=lambda rows: _tensors(pieces.of(rows[0]["piece"])),
            train_dataset=Dataset.from_dict({"piece": list(numbers)}),
            processing_class=tokenizer,
            callbacks=[_AroundSteps(self)],
        )
        if training.stopping is not None:
            self._stopping = Stopping(training.stopping.patience, training.stopping.min_delta)
            self._stopping.early_stopping_patience_counter = training.before.without
            self.add_callback(self._stopping)
        self.remove_callback(PrinterCallback)
        self._reference = training.reference and self._placed(training.reference)
        # With this, the Trainer divides each piece's loss only by the number of pieces.
        self.model_accepts_loss_kwargs = False
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and parameter.dtype != parameters[name].dtype:
                # TRL casts the adapters of a quantized base to bfloat16. Cast back, they would stay rounded.
                parameter.data = parameters[name]

    def _placed(self, reference: Any) -> Any:
        """Prepare a frozen model, with TRL's head, on this process's device."""
        add_fused_lm_head(reference)
        if self.is_fsdp_enabled:
            # TRL's prepare_fsdp leaves the other processes without the weights that only one process loads.
            return fsdp2_prepare_model(self.accelerator, reference)
        return self.accelerator.prepare_model(reference, evaluation_mode=True)

    def go(self, checkpoint: Path | None) -> None:
        """Train to the last step; start from a checkpoint's folder if one is given.

        If the checkpoint is already at the last step, only read its parameters.
        """
        if checkpoint is None or self._training.start < self.args.max_steps:
            self.args.eval_on_start = bool(self._held_out) and checkpoint is None
            self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            return
        if self.is_fsdp_enabled:
            self.model, _ = self.accelerator.prepare(self.model, self.create_optimizer())
            self.model_wrapped = self.model
        self._load_from_checkpoint(str(checkpoint), self.model)
        self.state.global_step = self._training.start

    def trained(self) -> dict[str, Any]:
        """Return the trained parameters by a trace's names; with FSDP, this process's shards."""
        return self._training.parameters(self.model)

    def get_train_dataloader(self) -> Any:
        """Load pieces one by one, the same numbers on each process; accelerate would distribute them."""
        # A separate generator: the loader draws a seed, which would change the dropout of a resumed run.
        return DataLoader(
            self.train_dataset, batch_size=1, collate_fn=self.data_collator, generator=torch.Generator()
        )

    def create_optimizer(self, model: Any = None) -> Optimizer:
        """Make the script's optimizer of the trained parameters."""
        if self.optimizer is None:
            trained, ratio = self.trained(), self._training.loraplus_lr_ratio
            if ratio is None:
                self.optimizer = self._training.optimizer(list(trained.values()))
            else:
                faster = (".lora_B", ".lora_magnitude")
                others = [p for name, p in trained.items() if not name.endswith(faster)]
                groups = others, [p for name, p in trained.items() if name.endswith(faster)]
                self.optimizer = self._training.optimizer([{"params": group} for group in groups])
                self.optimizer.param_groups[1]["lr"] *= ratio
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LRScheduler:
        """Make the script's schedule for the length of the whole run."""
        if self.lr_scheduler is None:
            self.lr_scheduler = self._training.schedule(self.optimizer if optimizer is None else optimizer)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the objective of this process's rows of a piece.

        The step's loss is its mean over processes and pieces, as gradients are averaged.
        """
        loss, more = self._objective(model, self._reference or self.model, inputs)
        if model.training:
            numbers = {
                "loss": loss.detach(),
                "tokens": inputs["tokens"],
                "targets": inputs["targets"],
                **more,
            }
            for name, number in numbers.items():
                self._sums[name] = self._sums.get(name, 0.0) + float(number)
            loss = loss * self.accelerator.num_processes * self.args.gradient_accumulation_steps
        return (loss, more) if return_outputs else loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Compute and report the mean loss over the targets of the evaluation data."""
        model = self.model_wrapped
        model.eval()
        with torch.no_grad():
            losses_here = [
                float(self.compute_loss(model, self._prepare_inputs(_tensors(piece))))
                for piece in self._held_out
            ]
        model.train()
        # The pieces' losses sum up to the loss, but `eval_losses` takes a mean.
        losses = eval_losses([loss * len(losses_here) for loss in self._total(losses_here)], self._parts)
        step, metrics = self.state.global_step, {"eval_loss": losses["loss"]}
        self._around.evaluated(step, losses)
        if self._counts(step):
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            self.control.should_save |= self.control.should_training_stop
        return metrics

    def _counts(self, step: int) -> bool:
        """Return whether an evaluation counts for early stopping: an uninterrupted run would make it too."""
        return step > 0 and step % self._training.eval_every == 0

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        return self._counts(self.state.global_step) and super()._determine_best_metric(metrics, trial)

    @property
    def evaluations(self) -> Evaluations:
        """Return the state of early stopping, if the recipe has it."""
        if self._stopping is None:
            return Evaluations()
        state = self.state
        without = self._stopping.early_stopping_patience_counter
        return Evaluations(1, state.best_metric, state.best_global_step, without)

    def _clip_grad_norm(self, model: Any) -> Any:
        """Clip gradients; keep the norm, and the gradients of the first step before clipping."""
        if self._training.keep_first and self.first_gradients is None:
            self.first_gradients = arrays({name: p.grad for name, p in self.trained().items()})
        norm = super()._clip_grad_norm(model)
        self._norm = float(whole(norm))
        return norm

    def before_steps(self) -> None:
        """Keep the trained values, after a checkpoint's values were loaded."""
        if self._training.keep_first:
            self.first_values = arrays(self.trained())

    def evaluates(self, step: int) -> bool:
        """Return whether to evaluate after a step."""
        due = step % self._training.eval_every == 0 or step == self.args.max_steps
        return due and bool(self._held_out)

    def after_step(self) -> bool:
        """Report the numbers of a step; return whether to stop."""
        *sums, stop = self._total([*self._sums.values(), float(self._around.stop())])
        more = dict(zip(self._sums, sums, strict=True))
        self._sums = {}
        # The schedule has already advanced to the next step.
        rate = self.lr_scheduler.base_lrs[0] * self.lr_scheduler.lr_lambdas[0](self.state.global_step - 1)
        numbers = {name: more.pop(name) for name in ("loss", "tokens", "targets")}
        self._around.done(
            self.state.global_step, {**numbers, "learning_rate": rate, "norm": self._norm}, more
        )
        return stop > 0

    def _total(self, values: list[float]) -> list[float]:
        """Sum each number over the processes."""
        if self.accelerator.num_processes == 1:
            return values
        together = torch.tensor(values, dtype=torch.float32, device=self.accelerator.device)
        return [float(value) for value in self.accelerator.reduce(together, "sum")]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save the Trainer's checkpoint and the position in the data. trainer_state.json is written last."""
        if self.args.should_save:
            folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / DATA).write_text(json.dumps(self._around.state(self.state.global_step)))
        super(SFTTrainer, self)._save_checkpoint(model, trial)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save only the trained parameters, without the base."""
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        trained = {name: p.detach().cpu() for name, p in self.trained().items()}
        save_file(trained, folder / TRAINED)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load what `_save` wrote; FSDP reads its own shards."""
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        saved = load_file(Path(resume_from_checkpoint, TRAINED))
        with torch.no_grad():
            for name, parameter in self.trained().items():
                parameter.copy_(saved[name])


class Stopping(EarlyStoppingCallback):
    """transformers' rule for early stopping, without its checks of the Trainer's evaluation settings."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Do nothing, so that those checks are skipped."""


class _AroundSteps(TrainerCallback):
    """Makes the trainer keep its first values, report each step, and evaluate and stop at the right steps."""

    def __init__(self, trainer: RecipeTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self._trainer.before_steps()
        return control

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self._trainer.after_step():
            control.should_training_stop = control.should_save = True
        elif self._trainer.evaluates(state.global_step):
            control.should_evaluate = True
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        # The actions that the last step requested are done; without this they would run a second time.
        control.should_evaluate = control.should_save = False
        return control


def _tensors(piece: Batch) -> dict[str, Any]:
    """Convert a piece to the form that `compute_loss` takes."""
    return {name: torch.from_numpy(array) for name, array in piece.items()}


def arrays(tensors: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return copies of tensors as float32 arrays, gathered if they are split over processes."""
    return {name: whole(tensor).detach().float().cpu().numpy().copy() for name, tensor in tensors.items()}


def whole(tensor: Any) -> Any:
    """Return a tensor, gathered if it is split over processes; then all processes must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
