"""The training loop: Tunix's PeftTrainer with steps that can be resumed exactly."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from tunix.sft.metrics_logger import MetricsLogger
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

from ..checkpoints.resuming import describe
from ..checkpoints.saving import Checkpoints, LocalCheckpoints, StepArrays, kept, set_step
from ..data.batches import TrainingData
from ..errors import UserError
from ..hosts.single import SINGLE, SingleProcess
from ..interrupts import Interrupted, Interrupts
from ..metrics.loggers import LOSS, REWARD
from ..metrics.run_report import ExpertShares, Named, NotFinite, Numbers, Report, advice
from ..model.loading import Built, unrounded
from ..model.partition_rules import data_parallel
from ..model.sharding import Rows
from ..settings import CheckpointSettings, TrainSettings
from .evaluation import Answer, Evaluating, answered, jit_answers
from .losses import Batch
from .objective_losses import micro_batch_loss
from .objectives import keeps_copy
from .step import Step, fit_shardings, trained_type, update_rule

if TYPE_CHECKING:
    from ..data.prompts import Prompts
    from ..hosts.group import ProcessGroup
    from ..metrics.loggers import Metrics, Nowhere
    from .recorder import Recorder


@dataclass
class TrainingOutcome:
    """The result of a run.

    Attributes:
        step: the optimizer step that the run ended at.
        loss: of this process's last step, None if it did none.
        eval_loss: the last one, None without evaluation.
        eval_reward: that of held-out prompts, None without.
        early: why the run ended before its last step, None if it did not.
        tokens_per_second: real tokens, without the first step (which compiles) where there are more.
    """

    step: int
    loss: float | None = None
    eval_loss: float | None = None
    tokens_per_second: float | None = None
    early: str | None = None
    eval_reward: float | None = None

    def evaluated(self, numbers: Mapping[str, float]) -> None:
        """Take the numbers of an evaluation."""
        self.eval_loss, self.eval_reward = numbers.get(LOSS.key), numbers.get(REWARD.key)


OF_TUNIX = ("_train_steps", "_iter_steps", "_lora_enabled", "_throttler")
"""The private attributes of Tunix's PeftTrainer that Trainer uses: the optimizer steps and the micro-batches
so far, whether only adapters are trained, and the limit of steps in flight."""


@dataclass(frozen=True)
class Checkpointing:
    """Where a run saves its checkpoints, and which one it continues from.

    Attributes:
        directory: local and absolute, or gs://.
        step: the step of the checkpoint to restore; None for the newest one, if there is any.
        local: checkpoints on this machine's own disk, None for none.
        evaluations: the counts of the run's evaluations until that step, as it stores them; None for none.
    """

    directory: str
    settings: CheckpointSettings
    step: int | None = None
    local: LocalCheckpoints | None = None
    evaluations: Mapping[str, Any] | None = None


class Trainer(PeftTrainer):
    """Train the adapters of a model, or, without LoRA, all of it.

    An optimizer step is `accumulation` micro-batches, whose gradients are averaged. Dropout depends only on
    the seed, the row's number in the run and the projection. So an interrupted run continues as if it had not
    been interrupted, with the same or another number of micro-batches in a step.

    Args:
        built: the model.
        optimizer: the recipe's chain.
        mesh: in scope while the trainer is made and used.
        accumulation: micro-batches of an optimizer step.
        checkpointing: where it saves, and which checkpoint it continues from.
        recorder: records the run's trace, None for a run without one.

    Raises:
        UserError: when the checkpoint does not fit the model.
    """

    def __init__(
        self,
        built: Built,
        optimizer: optax.GradientTransformation,
        settings: TrainSettings,
        mesh: Mesh,
        accumulation: int,
        checkpointing: Checkpointing,
        recorder: Recorder | None = None,
    ) -> None:
        directory, local = checkpointing.directory, checkpointing.local
        self._recorder, self._local = recorder, local
        self._built = built
        self._provider = built.provider
        self._mesh = mesh
        self._settings = settings
        self._accumulation = accumulation
        self._directory = directory
        self._every_steps = checkpointing.settings.every_steps
        self._keep_best = checkpointing.settings.keep_best
        self._counted = checkpointing.evaluations
        self._checked = False
        self._answer: dict[bool, Answer] = {}
        qat, self._before = built.forward.settings.qat, built
        self._rounds_from = 0 if qat is None else qat.start_step
        if self._rounds_from:
            self._before = unrounded(built)
        super().__init__(
            built.model,
            update_rule(built, optimizer),
            TrainingConfig(
                eval_every_n_steps=settings.eval_every,
                # optax.MultiSteps keeps its own gradient, which a single micro-batch does not need.
                gradient_accumulation_steps=accumulation if accumulation > 1 else None,
            ),
            MetricsLogger(),
        )
        fit_shardings(self.optimizer, mesh)
        self._reference: Any = None
        if keeps_copy(settings, built.lora):
            # A step donates the arrays themselves, and a checkpoint's arrays replace them.
            self._reference = jax.tree.map(jnp.copy, nnx.state(built.model, trained_type(built)))
        self.checkpoint_manager = Checkpoints(directory, checkpointing.settings.keep)
        saved = self.checkpoint_manager.latest_step()
        step = saved if checkpointing.step is None else checkpointing.step
        if step is not None:
            manager = local if local is not None and local.chosen == step else self.checkpoint_manager
            manager.restore(step, self._arrays())
            set_step(self.optimizer, step, accumulation)
            self._train_steps, self._iter_steps = step, step * accumulation
        self._restored = self._iter_steps

    def fit(
        self,
        data: TrainingData,
        until: int,
        schedule: Callable[[int], Any],
        metrics: Metrics | Nowhere,
        interrupts: Interrupts,
        hosts: SingleProcess | ProcessGroup = SINGLE,
    ) -> TrainingOutcome:
        """Train from the restored step to step `until`, and save the last one.

        Args:
            until: the step to stop after.
            schedule: learning rate by optimizer step, from 0.
            hosts: the processes of the run.

        Raises:
            UserError: when the loss or the gradient is not finite, or a checkpoint cannot be written.
            Interrupted: after a signal, once the step is done and saved.
        """
        self._tokens, self._rows, self._hosts = data.tokens, data.rows, hosts
        self._numbers = data.numbers
        if not isinstance(hosts, SingleProcess):
            self.checkpoint_manager.on_failure = hosts.give_up
        if self._recorder is not None:
            self._recorder.begin(self.model)
        train_step, eval_step = self.jit_train_and_eval_step()
        outcome = TrainingOutcome(self._train_steps)
        shares = self._shares()
        report = Report(self._train_steps, until, self._settings.log.every, schedule, metrics, shares)
        evaluating = self._evaluating(eval_step, data, report) if data.evaluates else None
        if evaluating is not None and self._train_steps == 0:
            outcome.evaluated(evaluating.run(0))
            report.restart()
        # check_used() below counts only the adapters that the training step itself uses.
        if self._provider is not None:
            self._provider.used.clear()
        stream = iter(data.batches(self._train_steps))
        interrupts.deferred = True
        early = evaluating is not None and evaluating.ends
        try:
            while (
                not early
                and self._train_steps < until
                and hosts.may_begin(self._train_steps + 1, interrupts.requested)
            ):
                try:
                    numbers = self._step(train_step, stream)
                except (UserError, Interrupted):
                    self._rescue(data, report, metrics, evaluating)
                    raise
                step = self._train_steps
                report.add(numbers)
                save = step == until or step % self._every_steps == 0
                keep = self._local is not None and not save and step % self._local.every_steps == 0
                evaluate = evaluating is not None and (step == until or step % self._settings.eval_every == 0)
                if save or keep or evaluate or report.due(step):
                    report.read()
                if evaluate and evaluating is not None:
                    measured = evaluating.run(step)
                    outcome.evaluated(measured)
                    best, early = evaluating.count(step, measured), evaluating.ends
                    save = save or early or (best and self._keep_best)
                if save or keep:
                    metrics.flush()
                if save:
                    self._save(step, self._metadata(data, evaluating))
                elif keep and self._local is not None:
                    self._put_back()
                    self._local.write(step, self._arrays(), self._metadata(data, evaluating))
                if save or keep or evaluate:
                    report.restart()
            if self._train_steps < until and not early:  # asked to stop
                report.read()
                metrics.flush()
                self._save(self._train_steps, self._metadata(data, evaluating))
            self._finish()
        except NotFinite as error:
            self.close()
            raise error.described(self._accumulation, data.origins, kept(self._directory)) from None
        finally:
            self._put_back()
            interrupts.deferred = False
            report.close()
        if early and evaluating is not None:
            outcome.early = metrics.early = evaluating.sentence(self._train_steps)
        elif hosts.stopped_by is not None and self._train_steps < until:
            raise Interrupted(hosts.stopped_by)
        outcome.step, outcome.loss, outcome.tokens_per_second = self._train_steps, report.loss, report.speed
        return outcome

    def current(self) -> tuple[Built, Step, Any]:
        """Return the model of the next step, the functions of steps, and the newest trained arrays."""
        built = self._built if self._train_steps >= self._rounds_from else self._before
        return built, self._step_functions, self._live[0]

    def _rescue(
        self,
        data: TrainingData,
        report: Report,
        metrics: Metrics | Nowhere,
        evaluating: Evaluating | None,
    ) -> None:
        """Save the last whole step of a run whose next batch fails, unless its checkpoint exists. Several
        processes do not learn of the failure at the same step, and save nothing."""
        if self._numbers is None or self._hosts.count > 1 or self._iter_steps == self._restored:
            return
        report.read()
        metrics.flush()
        self._save(self._train_steps, self._metadata(data, evaluating))
        self._finish()

    def close(self) -> None:
        """Wait for a checkpoint that is being written. `fit` has raised the errors of earlier ones."""
        with suppress(UserError):
            self._finish()

    def _finish(self) -> None:
        if self._local is not None:
            self._local.finish()
        self.checkpoint_manager.finish()

    def jit_train_and_eval_step(
        self, skip_jit: bool = False, cache_nnx_graph: bool = False
    ) -> tuple[Callable[[Batch], tuple[jax.Array, jax.Array, Named]], Callable[[Batch], jax.Array]]:
        """Return the compiled steps.

        The training step donates the trained arrays and the optimizer's state, and returns them.
        """
        step = self._step_of(self._built)
        self._live, self._step_functions = jax.device_put(step.live, step.shardings), step
        first = self._step_of(self._before) if self._rounds_from else step
        later, earlier = (
            (
                variant.jit(),
                variant.jit_evaluation(),
                None if self._recorder is None else variant.jit_gradients(),
            )
            for variant in (step, first)
        )

        def train_step(batch: Batch) -> tuple[jax.Array, jax.Array, Named]:
            train, _, gradients = later if self._train_steps >= self._rounds_from else earlier
            if self._recorder is not None and gradients is not None:
                self._recorder.before(batch, lambda: gradients(self._live[0], step.base, batch))
            self._live, loss, norm, more = train(self._live, step.base, batch)
            return loss, norm, more

        return train_step, lambda batch: (later if self._rounds else earlier)[1](
            self._live[0], step.base, batch
        )

    @property
    def _rounds(self) -> bool:
        """Whether the last step rounded as the recipe's train.qat says, or the first one will."""
        return self._train_steps > self._rounds_from or not self._rounds_from

    def _step_of(self, built: Built) -> Step:
        loss = functools.partial(micro_batch_loss, built, self._settings)
        return Step(built, self.optimizer, self._settings, self._mesh, loss, self._reference)

    def _step(self, train_step: Any, stream: Iterator[Batch]) -> Numbers:
        losses: list[jax.Array] = []
        metrics: list[Named] = []
        tokens, begun = 0, time.perf_counter()
        waited = 0.0
        for batch in itertools.islice(stream, self._accumulation):
            if self._tokens is None:
                tokens += int(np.count_nonzero(batch["segment_ids"]))
            else:
                tokens += self._tokens(int(batch["index"]))
            before = time.perf_counter()
            self._throttler.wait_for_next()
            waited += time.perf_counter() - before
            loss, norm, more = train_step(self._placed(batch))
            self._throttler.add_computation(loss)
            if not self._checked and self._provider is not None:
                self._provider.check_used()
                self._checked = True
            losses.append(loss)
            metrics.append(more)
        if len(losses) < self._accumulation:
            raise UserError(
                f"the training data ended within step {self._train_steps + 1}",
                "its files changed during the run: restore them, and continue with --resume",
            )
        self._iter_steps += self._accumulation
        measured: Mapping[str, float] = {}
        if self._numbers is not None:
            measured = self._timed(self._numbers(self._train_steps), tokens, begun, losses[-1])
        self._train_steps += 1
        seconds = time.perf_counter() - begun - waited
        self._hosts.log(f"step {self._train_steps}: {seconds:.3f} s here, {waited:.3f} s waiting for devices")
        if self._recorder is not None:
            self._recorder.after(self._train_steps, losses)
        return Numbers(self._train_steps, losses, norm, tokens, metrics, measured)

    def _timed(
        self, numbers: Mapping[str, float], tokens: int, begun: float, loss: jax.Array
    ) -> Mapping[str, float]:
        """Wait for a step on completions, and add the seconds of its update to its metrics."""
        jax.block_until_ready(loss)
        seconds = time.perf_counter() - begun
        seconds -= sum(numbers.get(name, 0.0) for name in ("rollout_seconds", "reward_seconds"))
        return {**numbers, "update_seconds": seconds, "update_tokens_per_second": tokens / max(seconds, 1e-9)}

    def _placed(self, batch: Batch) -> dict[str, jax.Array]:
        rows = self._rows or Rows.of(self._mesh, len(batch["tokens"]))
        return rows.place(batch)

    def _shares(self) -> ExpertShares | None:
        """Return the counter of the experts' shares of tokens; None for a model without experts."""
        about = self._built.forward.architecture
        if not about.expert_layers:
            return None
        help = advice(self._settings.router_aux_loss_coef, about.balanced)
        return ExpertShares(about.expert_layers, about.routing[1], help)

    def _evaluating(self, eval_step: Any, data: TrainingData, report: Report) -> Evaluating:
        def loss_of(batch: Batch) -> jax.Array:
            self._throttler.wait_for_next()
            loss: jax.Array = eval_step(self._placed(batch))
            self._throttler.add_computation(loss)
            return loss

        kept = self.checkpoint_manager.kept if self._keep_best else None
        return Evaluating(loss_of, self._answers, data, report, self._settings, self._counted, kept)

    def _answers(self, prompts: Prompts) -> list[dict[str, Any]]:
        step = self._step_functions
        rounds = self._rounds
        if rounds not in self._answer:
            forward = (self._built if rounds else self._before).forward
            self._answer[rounds] = jit_answers(forward, step.merged, self._mesh, prompts)
        answer = functools.partial(self._answer[rounds], self._live[0], step.base)
        return answered(answer, prompts, self._rows or Rows.of(self._mesh, data_parallel(self._mesh.shape)))

    def _metadata(self, data: TrainingData, evaluating: Evaluating | None) -> dict[str, Any]:
        """Return the metadata that the checkpoint of the finished step stores with its arrays."""
        counted = None if evaluating is None else evaluating.state
        return describe(data.state(self._train_steps), counted)

    def _save(self, step: int, metadata: Mapping[str, Any]) -> None:
        if self.checkpoint_manager.latest_step() == step:  # it is saved, or being saved
            return
        self._put_back()
        self.checkpoint_manager.write(step, self._arrays(), metadata)

    def _arrays(self) -> StepArrays:
        return StepArrays(self.model, self.optimizer, self._lora_enabled)

    def _put_back(self) -> None:
        """Give the model and the optimizer their newest arrays; the older ones were donated."""
        nnx.update(self.model, self._live[0])
        nnx.update(self.optimizer, self._live[1])
