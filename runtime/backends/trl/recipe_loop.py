"""What the trainers of a recipe's run by TRL share: trained parameters, the script's optimizer and schedule,
checkpoints of the trained parameters alone, and the report of each step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer, TrainerCallback

from ...sections import EarlyStopping
from ...training.early_stopping import Evaluations
from .trl_checkpoints import DATA, TRAINED

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


class RecipeLoop(Trainer):
    """The part of a recipe's trainer that does not depend on its objective; a base before TRL's trainer.

    Attributes:
        first_values: the trained values before the first step, in float32; None before that, or if not kept.
        first_gradients: of that step, before clipping, in float32; None before that, or if not kept.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any
    held_out: Any = ()

    @property
    def evaluations(self) -> Evaluations:
        """Return the state of early stopping."""
        return Evaluations()

    def prepare_loop(self, training: Training, around: Surroundings) -> None:
        """Set what the methods below read, before TRL's own `__init__`."""
        self._training, self._around = training, around
        self._sums: Numbers = {}
        self._norm = 0.0
        self.first_values: dict[str, np.ndarray] | None = None
        self.first_gradients: dict[str, np.ndarray] | None = None

    def named(self) -> dict[str, float]:
        """Return further metrics of a step, which do not depend on the process."""
        return {}

    def cast_back(self, parameters: Mapping[str, Any]) -> None:
        """Give parameters the values that they had before TRL's `__init__` (`trainable`).

        It casts the adapters of a quantized base to bfloat16. Cast back, they would stay rounded.
        """
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and parameter.dtype != parameters[name].dtype:
                parameter.data = parameters[name]

    def go(self, checkpoint: Path | None) -> None:
        """Train to the last step; start from a checkpoint's folder if one is given.

        If the checkpoint is already at the last step, only read its parameters.
        """
        if checkpoint is None or self._training.start < self.args.max_steps:
            self.args.eval_on_start = bool(self.held_out) and checkpoint is None
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

    def after_step(self) -> bool:
        """Report the numbers of a step; return whether to stop."""
        *sums, stop = self._total([*self._sums.values(), float(self._around.stop())])
        more = dict(zip(self._sums, sums, strict=True))
        self._sums = {}
        # The schedule has already advanced to the next step.
        rate = self.lr_scheduler.base_lrs[0] * self.lr_scheduler.lr_lambdas[0](self.state.global_step - 1)
        numbers = {name: more.pop(name) for name in ("loss", "tokens", "targets")}
        self._around.done(
            self.state.global_step,
            {**numbers, "learning_rate": rate, "norm": self._norm},
            {**more, **self.named()},
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
        Trainer._save_checkpoint(self, model, trial)  # TRL's own writes a model card too

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

    def evaluates(self, step: int) -> bool:
        """Return whether to evaluate after a step."""
        due = step % self._training.eval_every == 0 or step == self.args.max_steps
        return due and bool(self.held_out)


class AroundSteps(TrainerCallback):
    """Makes the trainer keep its first values, report each step, and evaluate and stop at the right steps."""

    def __init__(self, trainer: RecipeLoop) -> None:
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


def trainable(model: Any) -> dict[str, Any]:
    """Return the values of a model's parameters that are trained, by their names."""
    return {name: p.data for name, p in model.named_parameters() if p.requires_grad}


def arrays(tensors: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return copies of tensors as float32 arrays, gathered if they are split over processes."""
    return {name: whole(tensor).detach().float().cpu().numpy().copy() for name, tensor in tensors.items()}


def whole(tensor: Any) -> Any:
    """Return a tensor, gathered if it is split over processes; then all processes must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
