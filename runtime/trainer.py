"""The training loop: Tunix's PeftTrainer with steps that can be resumed exactly."""

from __future__ import annotations

import functools
import itertools
import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from orbax.checkpoint.checkpoint_managers import FixedIntervalPolicy
from tunix.sft.metrics_logger import MetricsLogger
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

from runtime import sharding
from runtime.errors import UserError
from runtime.interrupts import Interrupted, Interrupts
from runtime.lora import mask_gradients
from runtime.loss import Batch, batch_loss
from runtime.metrics import Metrics
from runtime.model import Built
from runtime.progress import duration
from runtime.settings import CheckpointSettings, TrainSettings


class GradientNorm(NamedTuple):
    """State of `record_norm`: the norm of the last step's gradient, float32[]."""

    recorded_norm: jax.Array


def record_norm() -> optax.GradientTransformation:
    """Passes gradients through and keeps their global norm in its state."""

    def update(updates: Any, state: GradientNorm, params: Any = None) -> tuple[Any, GradientNorm]:
        return updates, GradientNorm(optax.global_norm(updates).astype(jnp.float32))

    return optax.GradientTransformation(lambda params: GradientNorm(jnp.zeros([], jnp.float32)), update)


@dataclass
class Outcome:
    """What a run came to.

    Attributes:
        step: the optimizer step that it ended at.
        loss: of the last step of this process, None when it did none.
        eval_loss: the last one, None without evaluation.
        tokens_per_second: real tokens, without the first step (which compiles) where there are more.
    """

    step: int
    loss: float | None = None
    eval_loss: float | None = None
    tokens_per_second: float | None = None


class Trainer(PeftTrainer):
    """Trains the adapters of a model.

    An optimizer step is `accumulation` micro-batches, whose gradients are averaged. Dropout depends on
    the seed, the number of the micro-batch and the module alone, so that a run that was interrupted
    goes on as if it had not been.

    Args:
        built: the model with its adapters.
        optimizer: the recipe's chain.
        mesh: in scope while the trainer is made and used.
        directory: for checkpoints, local and absolute or gs://. The newest one in it is restored.
        accumulation: micro-batches of an optimizer step.
    """

    def __init__(
        self,
        built: Built,
        optimizer: optax.GradientTransformation,
        settings: TrainSettings,
        checkpoint: CheckpointSettings,
        mesh: Mesh,
        directory: str,
        accumulation: int,
    ) -> None:
        assert built.provider is not None
        self._provider = built.provider
        self._forward = built.forward
        self._mesh = mesh
        self._settings = settings
        self._accumulation = accumulation
        self._directory = directory
        self._every_steps = checkpoint.every_steps
        self._checked = False
        super().__init__(
            built.model,
            optax.chain(mask_gradients(built.adapters), record_norm(), optimizer),
            TrainingConfig(
                eval_every_n_steps=settings.eval_every,
                gradient_accumulation_steps=accumulation,
                checkpoint_root_directory=directory,
                checkpointing_options=ocp.CheckpointManagerOptions(
                    save_decision_policy=FixedIntervalPolicy(checkpoint.every_steps),
                    max_to_keep=checkpoint.keep,
                ),
            ),
            MetricsLogger(),
        )

    @property
    def saved_step(self) -> int | None:
        """The newest step whose checkpoint is whole."""
        return self.checkpoint_manager.latest_step()

    def fit(
        self,
        batches: Callable[[int], Iterable[Batch]],
        eval_batches: Sequence[Batch],
        until: int,
        schedule: Callable[[int], Any],
        metrics: Metrics,
        interrupts: Interrupts,
    ) -> Outcome:
        """Trains from the restored step to step `until`, and saves the last one.

        Args:
            batches: micro-batches from those of a given optimizer step on.
            until: the step to stop after.
            schedule: learning rate by optimizer step, from 0.

        Raises:
            UserError: when the loss or the gradient is not finite.
            Interrupted: after a signal, once the step is done and saved.
        """
        train_step, eval_step = self.jit_train_and_eval_step()
        outcome = Outcome(self._train_steps)
        report = Report(self._train_steps, until, self._settings.log_every, schedule, metrics)
        if eval_batches and self._train_steps == 0:
            outcome.eval_loss = self._evaluate(eval_step, eval_batches, metrics, report)
            report.restart()
        # Only what the training step itself uses counts.
        self._provider.used.clear()
        stream = iter(batches(self._train_steps))
        interrupts.deferred = True
        try:
            while self._train_steps < until and interrupts.requested is None:
                losses, norm, tokens = self._step(train_step, stream)
                step = self._train_steps
                report.add(step, losses, norm, tokens)
                last = step == until or interrupts.requested is not None
                save = last or step % self._every_steps == 0
                evaluate = bool(eval_batches) and (step == until or step % self._settings.eval_every == 0)
                if save or evaluate or report.due(step):
                    report.read()
                if evaluate:
                    outcome.eval_loss = self._evaluate(eval_step, eval_batches, metrics, report)
                if save:
                    metrics.flush()
                    self._save(step)
                if save or evaluate:
                    report.restart()
            self._finish_saving()
        finally:
            self._put_back()
            interrupts.deferred = False
            report.close()
        if interrupts.requested is not None and self._train_steps < until:
            raise Interrupted(interrupts.requested)
        outcome.step, outcome.loss, outcome.tokens_per_second = self._train_steps, report.loss, report.speed
        return outcome

    def close(self) -> None:
        """Waits for a checkpoint that is being written."""
        self.checkpoint_manager.close()

    def jit_train_and_eval_step(
        self, skip_jit: bool = False, cache_nnx_graph: bool = False
    ) -> tuple[Callable[[Batch], tuple[jax.Array, jax.Array]], Callable[[Batch], jax.Array]]:
        """The compiled steps.

        The adapters and the optimizer's state are donated, and only they come back. Tunix's own step
        returns the whole model, a second copy of the base weights on the devices.
        """
        model_graph, adapters, base = nnx.split(self.model, nnx.LoRAParam, ...)
        optimizer_graph, state = nnx.split(self.optimizer)
        shardings = (_shardings(adapters, self._mesh), _shardings(state, self._mesh))
        adapters, state = jax.device_put((adapters, state), shardings)
        self._live = (adapters, state)

        @functools.partial(jax.jit, donate_argnums=0, out_shardings=(shardings, None, None))
        def train(live: Any, base: Any, batch: Batch) -> Any:
            model = nnx.merge(model_graph, live[0], base)
            optimizer = nnx.merge(optimizer_graph, live[1])
            loss, norm = self._train_step(model, optimizer, batch)
            return (nnx.state(model, nnx.LoRAParam), nnx.state(optimizer)), loss, norm

        @jax.jit
        def evaluate(adapters: Any, base: Any, batch: Batch) -> jax.Array:
            return self._eval_step(nnx.merge(model_graph, adapters, base), batch)

        def train_step(batch: Batch) -> tuple[jax.Array, jax.Array]:
            self._live, loss, norm = train(self._live, base, batch)
            return loss, norm

        return train_step, lambda batch: evaluate(self._live[0], base, batch)

    def _step(self, train_step: Any, stream: Iterator[Batch]) -> tuple[list[jax.Array], jax.Array, int]:
        """One optimizer step: the losses of its micro-batches, its gradient's norm, its real tokens."""
        losses: list[jax.Array] = []
        tokens = 0
        for batch in itertools.islice(stream, self._accumulation):
            tokens += int(np.count_nonzero(batch["segment_ids"]))
            self._throttler.wait_for_next()
            loss, norm = train_step(sharding.shard_rows(batch, self._mesh))
            self._throttler.add_computation(loss)
            if not self._checked:
                self._provider.check_used()
                self._checked = True
            losses.append(loss)
        if len(losses) < self._accumulation:
            raise UserError(f"the training data ended within step {self._train_steps + 1}")
        self._iter_steps += self._accumulation
        self._train_steps += 1
        return losses, norm, tokens

    def _train_step(
        self, model: nnx.Module, optimizer: nnx.Optimizer, inputs: Batch
    ) -> tuple[jax.Array, jax.Array]:
        """Traced: one micro-batch. Returns its loss, and the norm of the last whole step's gradient."""

        def loss_of(model: nnx.Module) -> jax.Array:
            with self._provider.training(self._settings.seed, inputs["index"]):
                return self._loss(model, inputs)

        loss, gradients = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        optimizer.update(model, gradients)
        return loss, optax.tree_utils.tree_get(nnx.pure(optimizer.opt_state), "recorded_norm")

    def _eval_step(self, model: nnx.Module, inputs: Batch) -> jax.Array:
        """Traced: the loss of an evaluation batch, without dropout."""
        return self._loss(model, inputs)

    def _loss(self, model: nnx.Module, inputs: Batch) -> jax.Array:
        names = ("tokens", "positions", "segment_ids", "loss_mask", "norm")
        return batch_loss(self._forward, model, *(inputs[name] for name in names))

    def _evaluate(self, eval_step: Any, batches: Sequence[Batch], metrics: Metrics, report: Report) -> float:
        """The mean loss of the evaluation data's targets."""
        losses = []
        for batch in batches:
            self._throttler.wait_for_next()
            losses.append(eval_step(sharding.shard_rows(batch, self._mesh)))
            self._throttler.add_computation(losses[-1])
        loss = float(np.mean([float(loss) for loss in losses]))
        metrics.log("eval", self._train_steps, {"loss": loss})
        report.say(f"step {self._train_steps}: eval_loss {loss:.4f}")
        return loss

    def _save(self, step: int) -> None:
        """Starts saving a step; the arrays are copied before this returns, and written behind it."""
        if self.saved_step == step:
            return
        self._put_back()
        try:
            self.checkpoint_manager.save(
                step, self.model, self.optimizer, save_only_lora_params=True, force=True
            )
        except (OSError, ValueError) as error:
            raise self._not_saved(error) from error

    def _put_back(self) -> None:
        """Gives the model and the optimizer their newest arrays; the older ones were donated."""
        nnx.update(self.model, self._live[0])
        nnx.update(self.optimizer, self._live[1])

    def _finish_saving(self) -> None:
        try:
            self.checkpoint_manager.close()
        except (OSError, ValueError) as error:
            raise self._not_saved(error) from error

    def _not_saved(self, error: Exception) -> UserError:
        return UserError(
            f"{self._directory}: a checkpoint could not be written: {str(error).splitlines()[0]}",
            "make room or give the directory's rights, and continue with --resume",
        )


def _shardings(state: Any, mesh: Mesh) -> Any:
    """The sharding of each array of a state, from its variables' metadata."""
    return jax.tree.map(
        lambda spec: sharding.named(mesh, spec),
        nnx.get_partition_spec(state),
        is_leaf=lambda node: isinstance(node, PartitionSpec),
    )


class Report:
    """Reads numbers back from the devices in batches, and writes, prints and averages them.

    Args:
        start, until: first and last optimizer step of the run.
        every: steps between printed lines.
        schedule: learning rate by optimizer step, from 0.

    Attributes:
        loss: of the last step read.
    """

    def __init__(
        self, start: int, until: int, every: int, schedule: Callable[[int], Any], metrics: Metrics
    ) -> None:
        self.loss: float | None = None
        self._start, self._until, self._every = start, until, every
        self._schedule, self._metrics = schedule, metrics
        self._pending: list[tuple[int, list[jax.Array], jax.Array, int]] = []
        self._seconds = self._tokens = self._first_seconds = self._first_tokens = 0.0
        self._begun = self._since = time.perf_counter()
        self._bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=until, initial=start, desc="training", unit="step", dynamic_ncols=True)

    @property
    def speed(self) -> float | None:
        """Real tokens a second, without the first step, which compiles, where there are others."""
        if self._seconds > self._first_seconds:
            return (self._tokens - self._first_tokens) / (self._seconds - self._first_seconds)
        return self._tokens / self._seconds if self._seconds else None

    def add(self, step: int, losses: list[jax.Array], norm: jax.Array, tokens: int) -> None:
        """Takes the numbers of a step, which may still be being computed."""
        self._pending.append((step, losses, norm, tokens))
        if self._bar is not None:
            self._bar.update()

    def due(self, step: int) -> bool:
        """Whether it is time to read: after the first step, and every so many."""
        return step == self._start + 1 or step % self._every == 0

    def restart(self) -> None:
        """Leaves what was done since the last reading out of the time of the steps."""
        self._since = time.perf_counter()

    def read(self) -> None:
        """Waits for the steps taken and writes their numbers.

        Raises:
            UserError: naming the first step whose loss or gradient is not finite.
        """
        numbers = [
            (step, float(np.mean([float(loss) for loss in losses])), float(norm), tokens)
            for step, losses, norm, tokens in self._pending
        ]
        self._pending = []
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        tokens_read = sum(tokens for *_, tokens in numbers)
        self._seconds += seconds
        self._tokens += tokens_read
        if numbers and numbers[0][0] == self._start + 1:
            self._first_seconds, self._first_tokens = seconds, tokens_read
        for step, loss, norm, tokens in numbers:
            rate = float(self._schedule(step - 1))
            self._metrics.log(
                "train",
                step,
                {
                    "loss": loss,
                    "learning_rate": rate,
                    "grad_norm": norm,
                    "tokens": tokens,
                    "tokens_per_second": tokens_read / seconds,
                    "step_seconds": seconds / len(numbers),
                    "peak_memory_bytes": peak_memory(),
                },
            )
            self.loss = loss
            for what, value in (("loss", loss), ("gradient's norm", norm)):
                if not math.isfinite(value):
                    raise UserError(
                        f"step {step}: the {what} is {value}; nothing after the last checkpoint is kept",
                        "lower train.optimizer.learning_rate, or set max_grad_norm",
                    )
            if step == self._start + 1 or step % self._every == 0 or step == self._until:
                self._print(step, loss, rate, tokens_read / seconds)

    def say(self, line: str) -> None:
        """Prints a line, above the progress bar where there is one."""
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _print(self, step: int, loss: float, rate: float, speed: float) -> None:
        if self._bar is not None:
            self._bar.set_postfix(loss=f"{loss:.4f}", lr=f"{rate:.2e}", tokens_s=f"{speed:.0f}")
            return
        later = step - self._start - 1
        passed = time.perf_counter() - self._begun - self._first_seconds
        left = ""
        if later and step < self._until:
            left = f", {duration(passed / later * (self._until - step))} left"
        self.say(f"step {step}/{self._until}: loss {loss:.4f}, lr {rate:.2e}, {speed:.0f} tokens/s{left}")


def peak_memory() -> int:
    """Bytes: of the fullest device, or of the process where devices do not count (CPU)."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()]
    # Linux counts the resident set in KiB.
    return max(peaks) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
