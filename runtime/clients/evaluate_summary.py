"""The result of an evaluation: judges answers by what they must match, and writes the table of both sides.

The table has each side's intervals and the paired difference between the sides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..untrusted import TooLong, limit
from . import intervals
from .evaluate_answers import BASE, TITLES, TUNED, SamplingSettings, Side, SideAnswers, same_weights
from .evaluate_prompts import Prompt
from .evaluate_tasks import Score, TaskOutcome
from .markdown_table import cell, table

SECONDS = 2.0
"""The time limit of one search. Python's re can take exponential time, for example for (a+)+$."""


@dataclass(frozen=True)
class Judged:
    """The outcome of one prompt on one side.

    Attributes:
        answered, passed: number of samples with an answer, and number of those that match.
        cut: number of answers that `max_tokens` ended.
        missing: number of samples without an answer.
        undecided: the search took too long, so the prompt is not judged.
    """

    prompt: Prompt
    answered: int
    passed: int
    cut: int
    missing: int
    undecided: bool = False

    def rate(self, k: int) -> float | None:
        """Return pass@k, or None if too few samples were answered or judged."""
        return (
            None
            if self.undecided or self.answered < k
            else intervals.pass_at_k(self.answered, self.passed, k)
        )


def judge(
    prompts: Sequence[Prompt], answers: SideAnswers, settings: SamplingSettings, seconds: float = SECONDS
) -> list[Judged]:
    """Return the outcome of every prompt, in order.

    Args:
        seconds: time limit of one search. It works only in the main thread; other threads have no limit.
    """
    return [_one(prompt, answers, settings, seconds) for prompt in prompts]


def _one(prompt: Prompt, answers: SideAnswers, settings: SamplingSettings, seconds: float) -> Judged:
    replies = answers.of(prompt, settings)
    pattern = re.compile(prompt.expected)
    passed, undecided = 0, False
    try:
        for answer in replies:
            with limit(seconds):
                passed += pattern.search(answer.text) is not None
    except (TooLong, RecursionError, MemoryError):
        undecided = True
    cut = sum(answer.cut for answer in replies)
    return Judged(prompt, len(replies), passed, cut, settings.samples - len(replies), undecided)


FAULTS_SHOWN = 5

TEXTS = ("pass@k", "line", "task", "prompt", "metric")
"""Columns that hold text; the others hold numbers."""


@dataclass
class SideResults:
    """The results of one side.

    Attributes:
        judged: outcomes of the recipe's own prompts.
        others: number of recorded answers that were left out because their settings differ.
        failures: one sentence for each failed request.
        outcomes: the outcomes of lm-eval's tasks.
    """

    side: Side
    judged: Sequence[Judged] = ()
    others: int = 0
    failures: Sequence[str] = ()
    outcomes: Sequence[TaskOutcome] = field(default_factory=list)


def summary(
    name: str,
    settings: SamplingSettings,
    file: str | None,
    tasks: Sequence[str],
    results: Mapping[str, SideResults],
) -> dict[str, Any]:
    """Return all figures as plain data.

    Args:
        name: of the recipe.
        file: the file of the recipe's own prompts.
        tasks: the names of lm-eval's tasks.
        results: the results by the side's name.
    """
    return {
        "name": name,
        "sides": {
            side: {"model": result.side.model, "url": result.side.url, "vllm": result.side.version}
            for side, result in results.items()
        },
        "settings": asdict(settings),
        "prompts": _prompts(settings, file, results) if file else None,
        "tasks": [row for task in tasks for row in _task(task, results)],
        "problems": _problems(settings, file, tasks, results),
        "notes": _notes(results),
    }


def _prompts(settings: SamplingSettings, file: str, results: Mapping[str, SideResults]) -> dict[str, Any]:
    rates = {k: _rates(k, results) for k in intervals.ladder(settings.samples)}
    lines: list[dict[str, Any]] = []
    for side, result in results.items():
        for index, judged in enumerate(result.judged):
            if len(lines) <= index:
                lines.append({"line": judged.prompt.line, "prompt": judged.prompt.title})
            count = None if judged.undecided else judged.passed
            lines[index][side] = {"passed": count, "answered": judged.answered, "cut": judged.cut}
    return {"file": file, "pass_at": rates, "lines": lines}


def _rates(k: int, results: Mapping[str, SideResults]) -> dict[str, Any]:
    rates = {side: [judged.rate(k) for judged in result.judged] for side, result in results.items()}
    row: dict[str, Any] = {}
    for side, values in rates.items():
        known = [value for value in values if value is not None]
        if known:
            row[side] = {**asdict(intervals.mean_rate(known)), "prompts": len(known)}
    if BASE in rates and TUNED in rates:
        pairs = [
            (a, b) for a, b in zip(rates[BASE], rates[TUNED], strict=True) if a is not None and b is not None
        ]
        if pairs:
            difference = intervals.paired([a for a, _ in pairs], [b for _, b in pairs])
            row["difference"] = {**asdict(difference), "prompts": len(pairs)}
    return row


def _task(task: str, results: Mapping[str, SideResults]) -> list[dict[str, Any]]:
    """Return a row for each metric of a task; both sides are in it if both were asked in the same way."""
    outcomes = {
        side: outcome
        for side, result in results.items()
        for outcome in result.outcomes
        if outcome.task == task and outcome.failure is None
    }
    if len({(outcome.settings, outcome.version) for outcome in outcomes.values()}) > 1:
        del outcomes[BASE]
    scores: dict[tuple[str, str, str], dict[str, Score]] = {}
    for side, outcome in outcomes.items():
        for score in outcome.scores:
            scores.setdefault((score.task, score.metric, score.filter), {})[side] = score
    return [_score(key, sides) for key, sides in scores.items()]


def _score(key: tuple[str, str, str], sides: Mapping[str, Score]) -> dict[str, Any]:
    row: dict[str, Any] = {"task": key[0], "metric": key[1], "filter": key[2]}
    row["better"] = next(iter(sides.values())).better
    for side, score in sides.items():
        estimate = _estimate(score)
        row[side] = {
            "value": score.value,
            "low": estimate.low if estimate else None,
            "high": estimate.high if estimate else None,
            "questions": score.questions,
        }
    if BASE in sides and TUNED in sides:
        difference = _difference(sides[BASE], sides[TUNED])
        if difference is not None:
            row["difference"] = difference
    return row


def _estimate(score: Score) -> intervals.MeanEstimate | None:
    """Return Wilson's interval for a share of questions, else the interval from lm-eval's standard error."""
    values = list(score.by_question.values())
    if values and all(0 <= value <= 1 for value in values):
        rate = intervals.mean_rate(values)
        if abs(rate.value - score.value) < 1e-6:
            return rate
    return None if score.error is None else intervals.normal(score.value, score.error)


def _difference(base: Score, tuned: Score) -> dict[str, Any] | None:
    if base.by_question and base.by_question.keys() == tuned.by_question.keys():
        keys = sorted(base.by_question)
        first, second = [base.by_question[key] for key in keys], [tuned.by_question[key] for key in keys]
        interval = intervals.paired(first, second)
        # The paired difference is valid only for a mean over questions, not for F1 or perplexity.
        if abs(interval.value - (tuned.value - base.value)) < 1e-6:
            return {**asdict(interval), "paired": True}
    if base.error is None or tuned.error is None:
        return None
    apart = intervals.normal(tuned.value - base.value, (base.error**2 + tuned.error**2) ** 0.5)
    return {**asdict(apart), "paired": False}


def _problems(
    settings: SamplingSettings, file: str | None, tasks: Sequence[str], results: Mapping[str, SideResults]
) -> list[str]:
    """Return a sentence for each thing that makes the table incomplete."""
    problems = []
    for side, result in results.items():
        title = TITLES[side]
        missing = sum(judged.missing for judged in result.judged)
        total = len(result.judged) * settings.samples
        if file and missing:
            others = f" ({result.others} are recorded under other settings)" if result.others else ""
            problems.append(f"{title}: {missing} of {total} answers are missing{others}")
        for text in list(dict.fromkeys(result.failures))[:FAULTS_SHOWN]:
            count = sum(other == text for other in result.failures)
            problems.append(f"{title}: {count} request{'s' if count > 1 else ''} failed: {text}")
        problems += [
            f"{title}: line {judged.prompt.line}: its expression takes too long on an answer: given up"
            for judged in result.judged
            if judged.undecided
        ]
        for task in tasks:
            outcomes = [outcome for outcome in result.outcomes if outcome.task == task]
            if not outcomes:
                problems.append(f"{title}: there is no result of {task}")
            problems += [f"{title}: {o.failure}" for o in outcomes if o.failure is not None]
            problems += [
                f"{title}: {o.empty} answers to {task} are empty, which lm-eval counts as wrong"
                for o in outcomes
                if o.empty
            ]
    if BASE in results and TUNED in results:
        for task in tasks:
            kinds = {
                (outcome.settings, outcome.version)
                for result in results.values()
                for outcome in result.outcomes
                if outcome.task == task and outcome.failure is None
            }
            if len(kinds) > 1:
                problems.append(
                    f"{task} was asked in two ways, and its base is left out: run both sides again"
                )
    return problems


def _notes(results: Mapping[str, SideResults]) -> list[str]:
    notes = [
        f"{TITLES[side]}: not evaluated yet: eval.sh --side {side} --url URL"
        for side in (BASE, TUNED)
        if side not in results
    ]
    for side, result in results.items():
        cut = sum(judged.cut for judged in result.judged)
        total = sum(judged.answered for judged in result.judged)
        if cut:
            notes.append(f"{TITLES[side]}: {cut} of {total} answers were cut off by max_tokens")
    if BASE in results and TUNED in results and same_weights(results[BASE].side, results[TUNED].side):
        notes.append(
            "both sides give the same log probabilities: the adapter has no effect, or both are one model"
        )
    return notes


def markdown(data: Mapping[str, Any]) -> str:
    """Return the summary as a Markdown page."""
    sides = [side for side in (BASE, TUNED) if side in data["sides"]]
    lines = [f"# Evaluation of {data['name']}", ""]
    for side in sides:
        result = data["sides"][side]
        version = f", vLLM {result['vllm']}" if result["vllm"] else ""
        lines.append(f"- {TITLES[side]}: `{result['model']}` at {result['url']}{version}")
    lines += ["", "Brackets hold 95 % intervals."]
    if data["prompts"]:
        lines += ["", *_prompt_table(data, sides)]
    if data["tasks"]:
        lines += ["", *_task_table(data, sides)]
    for title, texts in (("Incomplete", data["problems"]), ("Notes", data["notes"])):
        if texts:
            lines += ["", f"## {title}", "", *(f"- {text}" for text in texts)]
    return "\n".join(lines) + "\n"


def _prompt_table(data: Mapping[str, Any], sides: Sequence[str]) -> list[str]:
    settings, prompts = data["settings"], data["prompts"]
    drawn = f"{settings['samples']} sample{'s' if settings['samples'] > 1 else ''} of each"
    lines = [
        f"## {prompts['file']}",
        "",
        f"{len(prompts['lines'])} prompts, {drawn}, temperature {settings['temperature']:g}, at most "
        f"{settings['max_tokens']} tokens.",
        "",
    ]
    titles = [TITLES[side] for side in sides]
    if len(sides) == 2:
        titles += ["difference", "better / worse", "p (sign test)"]
    rows = []
    for k, row in prompts["pass_at"].items():
        cells = [_percent(row.get(side)) for side in sides]
        if len(sides) == 2:
            difference = row.get("difference")
            cells.append(_percent(difference, sign="+"))
            cells += (
                [f"{difference['better']} / {difference['worse']}", f"{difference['p_value']:.2g}"]
                if difference
                else ["-", "-"]
            )
        rows.append([f"pass@{k}", *cells])
    lines += table(["pass@k", *titles], rows, TEXTS)
    if len(sides) == 2:
        lines += ["", "The difference is paired by prompt, its interval a bootstrap over prompts."]
    head = ["line", "prompt", *(TITLES[side] for side in sides)]
    rows = [
        [str(line["line"]), cell(line["prompt"]), *(_count(line.get(side)) for side in sides)]
        for line in prompts["lines"]
    ]
    return [*lines, "", *table(head, rows, TEXTS)]


def _task_table(data: Mapping[str, Any], sides: Sequence[str]) -> list[str]:
    titles = ["metric", *(TITLES[side] for side in sides), *(["difference"] if len(sides) == 2 else [])]
    rows = []
    for row in data["tasks"]:
        filter = "" if row["filter"] == "none" else f" ({row['filter']})"
        arrow = "" if row["better"] == "higher" else ", lower is better"
        cells = [_plain(row.get(side)) for side in sides]
        if len(sides) == 2:
            difference = row.get("difference")
            unpaired = " (unpaired)" if difference and not difference["paired"] else ""
            cells.append(_plain(difference, sign="+") + unpaired)
        rows.append([row["task"], f"{row['metric']}{filter}{arrow}", *cells])
    return ["## lm-evaluation-harness", "", *table(["task", *titles], rows, TEXTS)]


def _count(line: Mapping[str, Any] | None) -> str:
    if line is None or line["passed"] is None:
        return "-"
    return f"{line['passed']} / {line['answered']}"


def _percent(row: Mapping[str, Any] | None, sign: str = "") -> str:
    if row is None:
        return "-"
    value, low, high = (f"{row[key] * 100:{sign}.1f}" for key in ("value", "low", "high"))
    return f"{value} {'points' if sign else '%'} [{low}, {high}]"


def _plain(row: Mapping[str, Any] | None, sign: str = "") -> str:
    if row is None:
        return "-"
    if row["low"] is None:
        return f"{row['value']:{sign}.4g}"
    value, low, high = (f"{row[key]:{sign}.4g}" for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"
