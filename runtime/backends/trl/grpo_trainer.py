"""TRL's GRPOTrainer with a recipe's prompts in their order, its ends of completions, and its rewards.

TRL generates, by transformers or by its vLLM. Its data set has the numbers of the prompts among the samples,
so that it tokenizes nothing: the recipe's chat template has rendered the prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from ...data.prompt_order import PromptSchedule
from ...reinforcement.advantages import overlong_penalty
from ...reinforcement.asked import Prompts, reward_names
from ...reinforcement.loss_types import LOSS_TYPES
from ...reinforcement.rewards import Rewards
from ...sections import Grpo, RewardLimits
from ...settings import Reward
from .recipe_loop import AroundSteps, RecipeLoop, Surroundings, Training, trainable
from .start import TrlSettings

PENALTY = "overlong_penalty"
"""The name of train.grpo.overlong_penalty among TRL's reward functions."""

METRICS = {
    "reward": "reward",
    "reward_std": "reward_std",
    "frac_reward_zero_std": "frac_reward_zero_std",
    "completions/mean_length": "completion_length",
    "completions/min_length": "completion_length_min",
    "completions/max_length": "completion_length_max",
    "completions/clipped_ratio": "truncated_share",
    "kl": "kl",
    "entropy": "entropy",
    "clip_ratio/low_mean": "clip_low",
    "clip_ratio/high_mean": "clip_high",
    "cispo_clip_ratio": "clip_high",
    "aux_loss": "aux_loss",
}
"""TRL's names of metrics, with train.py's. TRL's reward_std is that of all rewards of a batch."""


Scored = Callable[..., list[float | None]]
"""A reward function as TRL calls it: with prompts, completions and completion_ids."""


def grpo_settings(
    settings: TrlSettings, common: Mapping[str, Any], ends: Sequence[int], vllm: str | None
) -> GRPOConfig:
    """Return a run's GRPOConfig: TRL's names of train.grpo's keys, besides the Trainer's own settings.

    Args:
        common: those settings.
        ends: the tokens that end a completion.
        vllm: TRL's vllm_mode, colocate or server; None generates with transformers.
    """
    train = settings.train
    grpo = train.grpo
    assert grpo is not None
    loss = "grpo" if grpo.loss == "gspo" else grpo.loss
    generation: dict[str, Any] = {"eos_token_id": list(ends)}
    if vllm is not None:
        generation = {"stop_token_ids": list(ends)}
    return GRPOConfig(
        **{**common, "per_device_train_batch_size": train.micro_batch_size},
        num_generations=grpo.num_generations,
        num_iterations=grpo.iterations,
        steps_per_generation=common["gradient_accumulation_steps"],
        shuffle_dataset=False,
        loss_type=loss,
        importance_sampling_level=grpo.ratio or LOSS_TYPES[grpo.loss].ratio,
        beta=grpo.beta,
        use_bias_correction_kl=grpo.kl_bias_correction,
        epsilon=grpo.epsilon,
        epsilon_high=grpo.epsilon_high,
        scale_rewards=grpo.scale_rewards,
        mask_truncated_completions=grpo.mask_truncated,
        max_completion_length=grpo.max_completion_length,
        temperature=grpo.temperature,
        top_p=grpo.top_p,
        top_k=grpo.top_k,
        min_p=grpo.min_p or None,
        generation_kwargs=generation,
        use_vllm=vllm is not None,
        vllm_mode=vllm or "colocate",
    )


@contextmanager
def reward_functions(
    rewards: Sequence[Reward],
    limits: RewardLimits,
    grpo: Grpo,
    prompts: Prompts,
    decode: Callable[[Sequence[int]], str],
) -> Iterator[list[tuple[str, float, Scored]]]:
    """Yield the recipe's rewards as TRL calls them, each with its name and its weight. Each function runs in
    a process of its own.

    Raises:
        UserError: a function cannot be imported.
    """
    with ExitStack() as stack:
        out = []
        for name, reward in zip(reward_names(rewards), rewards, strict=True):
            process = stack.enter_context(Rewards((reward,), limits.seconds, limits.memory_mebibytes * 2**20))
            process.start()
            out.append((name, reward.weight, _scored(process, prompts, decode)))
        if (buffer := grpo.overlong_penalty) is not None:

            def penalty(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
                lengths = np.array([list(map(len, completion_ids))])
                return list(overlong_penalty(lengths, grpo.max_completion_length, buffer)[0].tolist())

            out.append((PENALTY, 1.0, penalty))
        yield out


def _scored(process: Rewards, prompts: Prompts, decode: Callable[[Sequence[int]], str]) -> Scored:
    def scored(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float | None]:
        ids = [list(map(int, row)) for row in completion_ids]
        asked = prompts.asked([int(number) for number in columns["prompts"]], 1, [decode(row) for row in ids])
        scores: list[float | None] = process.score(asked[0], asked[1], ids, asked[2])[0]
        return scores

    return scored


class RewardTrainer(RecipeLoop, GRPOTrainer):
    """Trains a policy on rewards of its completions.

    Args:
        model: with its adapters, or with all of its text weights trainable.
        args: from `grpo_settings`.
        prompts: their order, and the tokens that end a completion.
        rewards: from `reward_functions`.
        training, around: of the run.
    """

    def __init__(
        self,
        model: Any,
        args: GRPOConfig,
        tokenizer: Any,
        prompts: tuple[PromptSchedule, Sequence[int]],
        rewards: Sequence[tuple[str, float, Scored]],
        training: Training,
        around: Surroundings,
    ) -> None:
        self.prepare_loop(training, around)
        schedule, ends = prompts
        self._samples = schedule.samples
        first = schedule.batch_after(training.start) * schedule.prompts
        last = max(schedule.batch_after(args.max_steps) * schedule.prompts, first + schedule.prompts)
        parameters = trainable(model)
        args.reward_weights = [weight for _, weight, _ in rewards]
        for name, _, function in rewards:
            function.__name__ = name
        super().__init__(
            model=model,
            args=args,
            reward_funcs=[function for *_, function in rewards],
            train_dataset=Dataset.from_dict(
                {"prompt": [str(schedule.prompt(number)) for number in range(first, last)]}
            ),
            processing_class=tokenizer,
            callbacks=[AroundSteps(self)],
        )
        self.remove_callback(PrinterCallback)
        self.eos_token_ids = list(ends)
        self.cast_back(parameters)

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
        """Return the recipe's tokens of prompts, which TRL has by their numbers."""
        return [self._samples[int(number)].tokens.tolist() for number in prompts], None, {}

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Draw completions, and their order, with noise of the run's seed and the step, so that a resumed run
        gets the same ones."""
        place = [self.args.seed, self.state.global_step, self.accelerator.process_index]
        # Name the devices: otherwise torch asks any backend that is registered in this process.
        device = self.accelerator.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(int(np.random.SeedSequence(place).generate_state(1)[0]))
            return super()._prepare_inputs(generation_batch)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return TRL's loss of a micro-batch, and add it to the step's."""
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        targets = float(inputs["completion_mask"].sum())
        numbers = {
            "loss": float(loss.detach()) / self.accelerator.num_processes,
            "tokens": float(inputs["prompt_mask"].sum()) + targets,
            "targets": targets,
        }
        for name, number in numbers.items():
            self._sums[name] = self._sums.get(name, 0.0) + number
        return loss

    def named(self) -> dict[str, float]:
        """Return the metrics of a step that TRL has counted over all processes, by train.py's names."""
        counted, self._metrics["train"] = dict(self._metrics["train"]), type(self._metrics["train"])(list)
        out: dict[str, float] = {}
        for name, values in counted.items():
            finite = [value for value in values if math.isfinite(value)]
            kind, _, rest = name.partition("/")
            if kind == "rewards":
                function, _, what = rest.rpartition("/")
                name = f"{'reward' if what == 'mean' else 'reward_std'}/{function}"
            elif name in METRICS:
                name = METRICS[name]
            else:
                continue
            if finite:
                out[name] = sum(finite) / len(finite)
        return out
