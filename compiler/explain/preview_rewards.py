"""Score completions with a recipe's rewards, as a run scores its own: given ones, or those of a model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipec.compiler.lowering.runtime_settings import data_settings, rewards_of
from recipec.compiler.wording import listing, plural
from recipec.runtime.data.file_rows import kind_of
from recipec.runtime.data.formats import PARSERS, prompt_column
from recipec.runtime.data.row_values import ColumnRow, Malformed, without_fillers
from recipec.runtime.errors import UserError
from recipec.runtime.reinforcement.ready_rewards import text_of
from recipec.runtime.reinforcement.rewards import Rewards
from recipec.runtime.settings import REWARD_ARGUMENTS, Source

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program
    from recipec.runtime.data.samples import Samples
    from recipec.runtime.settings import DataSettings

MOST = 64
"""Prompts whose completions are scored."""

SHOWN, SHOWN_CHARACTERS = 4, 200
"""The most completions of a model that are shown, and characters of each."""

IN_FILE = ("completions", "completion")
"""The columns of a file of completions."""


@dataclass(frozen=True)
class Scored:
    """What a reward gave the completions.

    Attributes:
        name: file.py:function, or a ready reward.
        weight: its factor.
        mean, least, most: of the scores; None if it scored none of them.
        unscored: completions for which it returned None.
        alike: prompts with several completions that all have the same score.
    """

    name: str
    weight: float
    mean: float | None
    least: float | None
    most: float | None
    unscored: int
    alike: int


@dataclass(frozen=True)
class RewardPreview:
    """The scores of completions.

    Attributes:
        place: the column or the file that the completions are from, or the model that wrote them.
        completions, groups: number of completions, and of prompts with several of them.
        scores: a row for each reward.
        shown: the first completions of a model, each with its scores.
    """

    place: str
    completions: int
    groups: int
    scores: tuple[Scored, ...]
    shown: tuple[tuple[str, tuple[float | None, ...]], ...] = ()

    def lines(self) -> Iterator[str]:
        """Yield what the command prints."""
        yield f"rewards of the {plural(self.completions, 'completion')} {self.place}:"
        for text, scores in self.shown:
            line = json.dumps(text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}...")
            yield f"  {', '.join('no score' if score is None else f'{score:g}' for score in scores)}: {line}"
        for score in self.scores:
            values = (
                "no score"
                if score.mean is None
                else f"mean {score.mean:.4g}, {score.least:g} to {score.most:g}"
            )
            left = f", {score.unscored} not scored" if score.unscored and score.mean is not None else ""
            yield f"  {score.weight:g} x {score.name}: {values}{left}"
        for score in self.scores:
            if self.completions > 1 and score.mean is not None and score.least == score.most:
                yield (
                    f"warning: {score.name} gives every completion {score.least:g}, so no completion is "
                    "better than another: the model learns nothing from it"
                )
            elif self.groups and score.alike == self.groups:
                yield (
                    f"warning: {score.name} gives the completions of each prompt the same score, so the "
                    "model learns nothing from it"
                )


def scored(program: Program, place: str, tokenizer: Any, data_dir: Path) -> RewardPreview:
    """Score completions of the recipe's first prompts.

    Args:
        place: a column of data.train with a completion, or a list of them, for each prompt; or a file whose
            rows are those of data.train with a column "completion" or "completions".
        tokenizer: from `load_tokenizer`.
        data_dir: the folder that relative paths of data start from.

    Raises:
        UserError: there are no completions, or a reward fails.
    """
    data = data_settings(program.recipe, program.source.parent)
    file = kind_of(place) is not None
    prompts: list[Any] = []
    completions: list[Any] = []
    group: list[int] = []
    columns: list[Mapping[str, Any]] = []
    for number, row in enumerate(islice(_rows(data, place if file else None, data_dir), MOST)):
        column = next((name for name in IN_FILE if row.get(name) is not None), IN_FILE[1]) if file else place
        value = row.get(column)
        if value is None:
            raise UserError(
                f"a prompt has no column {column!r}",
                f"its columns are {listing(map(str, row))}; a list has several completions of a prompt",
            )
        prompt = _prompt(row, data)
        left = _columns(row, data, column)
        texts = [value] if isinstance(value, str) else value
        for text in map(_text, texts if isinstance(texts, list) and texts else [value]):
            prompts.append(prompt)
            answer = [{"role": "assistant", "content": text}]
            completions.append(text if isinstance(prompt, str) else answer)
            columns.append(left)
            group.append(number)
    if not completions:
        raise UserError(f"{place} has no completions", "name a column of data.train, or a .jsonl file")
    ids = [
        tokenizer(text_of(completion), add_special_tokens=False)["input_ids"] for completion in completions
    ]
    names = dict.fromkeys(name for column in columns for name in column if name not in REWARD_ARGUMENTS)
    by_column = {name: [row.get(name) for row in columns] for name in names}
    where = place if file else f"the column {place}"
    return _by_rewards(program, f"in {where}", (prompts, completions, ids, by_column), group)[0]


def sampled(
    program: Program, samples: Samples, count: int, folder: Path, ends: Sequence[int]
) -> RewardPreview:
    """Score completions of the first prompts by a model of this machine, drawn as a run's first ones.

    Args:
        samples: the prompts.
        count: of prompts; each gets num_generations completions.
        folder: of complete weights, or of a PEFT adapter.
        ends: the tokens with which the data ends an answer.

    Raises:
        UserError: the model cannot be loaded, or a reward fails.
    """
    from recipec.runtime.inference.loaded_model import load_model
    from recipec.runtime.inference.text_generator import ROWS, Request, TextGenerator
    from recipec.runtime.model.sampling import Sampling
    from recipec.runtime.reinforcement.asked import Prompts, stop_tokens

    train, grpo = program.recipe.train, program.recipe.train.grpo
    assert grpo is not None
    model = load_model(folder)
    stops = sorted({*model.ends, *ends, *stop_tokens(grpo.stop, model.tokenizer)})
    sampling = Sampling(grpo.temperature, grpo.top_k, grpo.top_p, grpo.min_p)
    generator = TextGenerator(model, seed=train.seed)
    group = [index for index in range(min(count, len(samples))) for _ in range(grpo.num_generations)]
    requests = [
        Request(samples[index].tokens.tolist(), grpo.max_completion_length, sampling, stops)
        for index in group
    ]
    ids: list[list[int]] = []
    for start in range(0, len(requests), ROWS):
        ids += [answer.tokens for answer in generator.answer(requests[start : start + ROWS])]
    texts = [str(model.tokenizer.decode(row, skip_special_tokens=True)) for row in ids]
    asked = Prompts(samples).asked(sorted(set(group)), grpo.num_generations, texts)
    preview, scores = _by_rewards(
        program,
        f"by {folder}, of the first {plural(len(set(group)), 'prompt')} at temperature {grpo.temperature:g}",
        (asked[0], asked[1], ids, asked[2]),
        group,
    )
    shown = zip(texts[:SHOWN], zip(*(values[:SHOWN] for values in scores), strict=True), strict=True)
    return replace(preview, shown=tuple(shown))


def _by_rewards(
    program: Program, place: str, asked: tuple[Any, Any, Any, Any], group: Sequence[int]
) -> tuple[RewardPreview, list[list[float | None]]]:
    """Return what the recipe's rewards give completions, and the scores of each.

    Args:
        place: where the completions are from.
        asked: the arguments of `Rewards.score`.
        group: the number of each completion's prompt.
    """
    limits, rewards = program.recipe.reward_limits, rewards_of(program.recipe, program.source.parent)
    with Rewards(rewards, limits.seconds, limits.memory_mebibytes << 20) as running:
        scores = running.score(*asked)
    several = [members for members in _groups(group) if len(members) > 1]
    rows = (
        _scored(reward.name, reward.weight, values, several)
        for reward, values in zip(rewards, scores, strict=True)
    )
    return RewardPreview(place, len(group), len(several), tuple(rows)), scores


def _rows(data: DataSettings, file: str | None, data_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, or those of data.train after their transform."""
    from recipec.runtime.data.sources import Transform, records

    for source in data.train if file is None else (file,):
        name = None if file is not None else data.of(source).transform
        transform = None if name is None else Transform.load(name, data_dir)
        for origin, row in records(Source(source) if isinstance(source, str) else source, data_dir):
            if isinstance(row, Malformed):
                raise UserError(f"{origin}: {row}", "correct the row")
            kept = row if transform is None else transform(row, origin)
            if kept is not None:
                yield without_fillers(kept) if isinstance(row, ColumnRow) else kept


def _prompt(row: Mapping[str, Any], data: DataSettings) -> Any:
    try:
        sample = PARSERS["prompt"]("", row, data.fields)
    except Malformed as error:
        raise UserError(f"a row is no prompt: {error}", 'a row has "messages" or "prompt"') from None
    return getattr(sample, "messages", None) or getattr(sample, "prompt", "")


def _columns(row: Mapping[str, Any], data: DataSettings, completions: str) -> dict[str, Any]:
    """Return the columns that rewards get, by the names that they use."""
    names = {source: role for role, source in data.fields.items()}
    other = (prompt_column(row, data.fields), data.fields.get("tools", "tools"), completions)
    return {str(names.get(name, name)): value for name, value in row.items() if name not in (*other, None)}


def _text(completion: Any) -> str:
    """Return a completion's text: of messages, the last one's."""
    if isinstance(completion, dict):
        completion = [completion]
    if isinstance(completion, str | list):
        return text_of(completion)
    raise UserError(f"a completion is {completion!r}", "a completion is a text, or a list of messages")


def _groups(group: Sequence[int]) -> list[list[int]]:
    """Return the completions of each prompt by their numbers."""
    members: dict[int, list[int]] = {}
    for number, prompt in enumerate(group):
        members.setdefault(prompt, []).append(number)
    return list(members.values())


def _scored(
    name: str, weight: float, values: Sequence[float | None], several: Sequence[Sequence[int]]
) -> Scored:
    numbers = [value for value in values if value is not None]
    alike = sum(len({values[member] for member in members}) == 1 for members in several)
    if not numbers:
        return Scored(name, weight, None, None, None, len(values), alike)
    mean = sum(numbers) / len(numbers)
    return Scored(name, weight, mean, min(numbers), max(numbers), len(values) - len(numbers), alike)
