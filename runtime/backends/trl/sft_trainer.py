"""TRL's SFTTrainer with a recipe's own micro-batches, losses and position in the data."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, PrinterCallback
from trl import SFTConfig, SFTTrainer
from trl.trainer.utils import add_fused_lm_head

from ...data.batches import Batch, eval_losses
from ...training.early_stopping import Evaluations
from .pieces import Pieces
from .recipe_loop import AroundSteps, RecipeLoop, Surroundings, Training, trainable
from .trl_objectives import Objective

Numbers = dict[str, float]


class RecipeTrainer(RecipeLoop, SFTTrainer):
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
    """

    control: Any
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
        self.prepare_loop(training, around)
        self._objective = objective
        self.held_out, self._parts = pieces.evaluation(), pieces.eval_parts
        self._stopping: Stopping | None = None
        parameters = trainable(model)
        accumulation = args.gradient_accumulation_steps
        # At least one step's numbers, even if nothing is left to do, because TRL looks at the first row.
        numbers = range(start * accumulation, max(args.max_steps, start + 1) * accumulation)
        super().__init__(
            model=model,
            args=args,
            data_collator=lambda rows: _tensors(pieces.of(rows[0]["piece"])),
            train_dataset=Dataset.from_dict({"piece": list(numbers)}),
            processing_class=tokenizer,
            callbacks=[AroundSteps(self)],
        )
        if training.stopping is not None:
            self._stopping = Stopping(training.stopping.patience, training.stopping.min_delta)
            self._stopping.early_stopping_patience_counter = training.before.without
            self.add_callback(self._stopping)
        self.remove_callback(PrinterCallback)
        self._reference = training.reference and self._placed(training.reference)
        # With this, the Trainer divides each piece's loss only by the number of pieces.
        self.model_accepts_loss_kwargs = False
        self.cast_back(parameters)

    def _placed(self, reference: Any) -> Any:
        """Prepare a frozen model, with TRL's head, on this process's device."""
        add_fused_lm_head(reference)
        if self.is_fsdp_enabled:
            # TRL's prepare_fsdp leaves the other processes without the weights that only one process loads.
            return fsdp2_prepare_model(self.accelerator, reference)
        return self.accelerator.prepare_model(reference, evaluation_mode=True)

    def get_train_dataloader(self) -> Any:
        """Load pieces one by one, the same numbers on each process; accelerate would distribute them."""
        # A separate generator: the loader draws a seed, which would change the dropout of a resumed run.
        return DataLoader(
            self.train_dataset, batch_size=1, collate_fn=self.data_collator, generator=torch.Generator()
        )

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
                for piece in self.held_out
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


class Stopping(EarlyStoppingCallback):
    """transformers' rule for early stopping, without its checks of the Trainer's evaluation settings."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Do nothing, so that those checks are skipped."""


def _tensors(piece: Batch) -> dict[str, Any]:
    """Convert a piece to the form that `compute_loss` takes."""
    return {name: torch.from_numpy(array) for name, array in piece.items()}
