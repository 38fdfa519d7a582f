"""What rewards are asked: prompts with their columns, and where completions end. Without jax."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..data.samples import Samples
from ..data.stops import end_tokens, generation_config
from ..errors import UserError
from ..settings import Reward

if TYPE_CHECKING:
    from ..weights.checkpoint import HFCheckpoint


class Prompts:
    """Prompts, with the columns that rewards read.

    Attributes:
        samples: the prompts.
    """

    def __init__(self, samples: Samples) -> None:
        self.samples = samples
        keys: dict[str, None] = {}
        for index in range(len(samples)):
            keys.update(dict.fromkeys(samples.prompt(index)[1]))
        self._columns = list(keys)

    def asked(
        self, indices: Sequence[int], group: int, texts: Sequence[str]
    ) -> tuple[list[Any], list[Any], dict[str, list[Any]]]:
        """Return the prompts, completions and columns of rewards' calls, of len(indices) * group rows."""
        prompts: list[Any] = []
        columns: dict[str, list[Any]] = {name: [] for name in self._columns}
        for index in indices:
            prompt, row = self.samples.prompt(index)
            prompts += [prompt] * group
            for name in self._columns:
                columns[name] += [row.get(name)] * group
        answers = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        return prompts, answers, columns


def reward_names(rewards: Sequence[Reward]) -> list[str]:
    """Return a unique name of each reward for its metrics: that of its function, with a number if another one
    has it too."""
    names: list[str] = []
    for reward in rewards:
        name, count = reward.function, 1
        while name in names:
            count += 1
            name = f"{reward.function}_{count}"
        names.append(name)
    return names


def completion_ends(
    base: HFCheckpoint, tokenizer: Any, trained: Iterable[int], stop: Sequence[str]
) -> list[int]:
    """Return the tokens that end a completion.

    Args:
        trained: the tokens with which the data ends an answer.
        stop: train.grpo.stop.

    Raises:
        UserError: a text of `stop` is not one token.
    """
    generation = generation_config(base.side_files, base.side_file)
    ends = {*end_tokens(generation), tokenizer.eos_token_id, *trained} - {None}
    return sorted(ends | {*stop_tokens(stop, tokenizer)})


def stop_tokens(texts: Sequence[str], tokenizer: Any) -> list[int]:
    """Return the tokens of train.grpo.stop.

    Raises:
        UserError: a text is not one token.
    """
    out = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1 and text in tokenizer.get_vocab():
            ids = [tokenizer.convert_tokens_to_ids(text)]
        if len(ids) != 1:
            raise UserError(
                f"train.grpo.stop has {text!r}, which is {len(ids)} tokens of the tokenizer",
                "give texts that are one token, or let a reward function cut the completion there",
            )
        out.append(int(ids[0]))
    return out
