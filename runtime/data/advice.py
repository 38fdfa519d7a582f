"""Advise what to change in a recipe if its data does not fit; refuse data of which too little is usable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..errors import UserError
from ..settings import DataSettings
from .columns import COLUMN, NAMES, PARTS, READS, VAGUE
from .formats import ENDS_WITH_ANSWER
from .picture_rows import COLUMNS as PICTURES
from .row_counts import SplitReport

NO_SYSTEM = "it accepts the rest without the system message"
"""The reason if a template accepts the conversation without its system message."""

TEXT_AND_CALLS = "has text and tool calls, and the chat template"
"""The beginning of the reason if a template does not write a message's text and then its tool calls."""

WITHOUT_ANSWER = (
    "name the column of the question with data.fields: {prompt: COLUMN}; or leave the answer out with "
    'data.transform: "prompts.py:only", where prompts.py is\n'
    "def only(row):\n"
    '    return {**row, "messages": row["messages"][:-1]}'
)
"""The advice for a prompt that is a whole conversation."""

LIKED = (
    "data.format: unpaired_preference, with train.objective: kto; or, to learn the liked answers as they "
    'are, data.transform: "liked.py:liked", where liked.py is\n'
    "def liked(row):\n"
    '    return row if str(row.pop("label")).lower() == "true" else None'
)
"""Advice if rows say whether an answer is desirable, but the recipe does not use it."""

SHAPES = {
    "chat": '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}',
    "instruction": '{"instruction": "...", "input": "...", "output": "..."}',
    "prompt_completion": '{"prompt": "...", "completion": "..."}, each text or a list of messages',
    "text": '{"text": "..."}',
    "preference": '{"prompt": ..., "chosen": ..., "rejected": ...}, each text or a list of messages',
    "unpaired_preference": '{"prompt": ..., "completion": ..., "label": true}, text or lists of messages',
    "prompt": '{"messages": [{"role": "user", "content": "..."}], ...} or {"prompt": "...", ...}, and the '
    "columns that rewards read",
}
"""A row of each format."""

WRITTEN = "give data.chat_template a template that writes it, or move it into the content with data.transform"

WITHOUT = "to train without it, remove it with data.transform, or set data.max_invalid_ratio: 1"


def leftover(format: str, fields: Mapping[str, str], unused: Iterable[str]) -> str:
    """Return the advice if rows have content that is not used, and nothing is left without it.

    Args:
        unused: names of that content.
    """
    names = list(unused)
    columns = [name.removeprefix(COLUMN) for name in names if name.startswith(COLUMN)]
    system = next((column for column in columns if PARTS.get(column.lower()) == "system"), None)
    if format == "chat" and system is not None and "system" not in fields:
        others = f"; {WRITTEN}" if len(names) > 1 else ""
        return f"data.fields: {{system: {system}}} makes it the first message{others}; {WITHOUT}"
    if format == "prompt_completion" and columns:
        named = {
            role: fields.get(name, name)
            for role, name in (("instruction", "prompt"), ("output", "completion"))
        }
        renamed = ", ".join(f"{role}: {column}" for role, column in named.items())
        return (
            f"data.format: instruction, with data.fields: {{{renamed}}}, reads a context, a system prompt, "
            f"reasoning and tools; or move it into the text with data.transform; {WITHOUT}"
        )
    if columns and len(columns) == len(names):
        return f"move it into a column that the format reads with data.transform; {WITHOUT}"
    return f"{WRITTEN}; {WITHOUT}"


FOLDED = {
    "instruction": """\
def fold(row):
    if row.get("system"):
        row["instruction"] = row.pop("system") + "\\n\\n" + row["instruction"]
    return row""",
    "chat": """\
def fold(row):
    for turns in row.values():
        first = turns[0] if isinstance(turns, list) and len(turns) > 1 else None
        if isinstance(first, dict) and {"system", "developer"} & {first.get("role"), first.get("from")}:
            said = "content" if "content" in first else "value"
            turns[:2] = [{**turns[1], said: first[said] + "\\n\\n" + turns[1][said]}]
    return row""",
}
"""Functions for data.transform that put a system message at the beginning of the user's."""

SILENCED = """\
def only(row):
    for turns in row.values():
        for turn in turns if isinstance(turns, list) else []:
            if isinstance(turn, dict) and turn.get("tool_calls"):
                turn["content"] = ""
    return row"""
"""A function for data.transform that removes the text of messages that call tools."""


def folding(format: str, fields: Mapping[str, str]) -> str:
    """Return the advice for a chat template that accepts no system message."""
    code = _named(FOLDED.get(format, FOLDED["chat"]), fields)
    return f'fold it into the user\'s turn with data.transform: "fold.py:fold", where fold.py is\n{code}'


def silencing(fields: Mapping[str, str]) -> str:
    """Return the advice for a chat template that writes the text of a message after its tool calls."""
    return (
        "give the template of the model's newest revision as data.chat_template, if it writes the text "
        'first; or train without such texts, with data.transform: "calls.py:only", where calls.py is\n'
        + _named(SILENCED, fields)
    )


def _named(code: str, fields: Mapping[str, str]) -> str:
    for name, column in fields.items():
        code = code.replace(f'"{name}"', f'"{column}"')
    return code


def advice(format: str, fields: Mapping[str, str], columns: Sequence[str], place: str = "data") -> str:
    """Return what would fit a source: a line for the recipe, or the expected form of a row.

    Args:
        fields: the current `data.fields`.
        columns: names in the source's first row; empty if that row could not be read.
        place: where the recipe gives the source's format and fields: "data", or data.train[0] of several.
    """
    needed = READS[format][0] if format in READS else ("prompt",)
    missing = [name for name in needed if fields.get(name, name) not in columns]
    if format == "preference" and not missing and "prompt" not in fields:
        column = _synonym("prompt", [name for name in columns if name not in VAGUE])
        column = None if column == "prompt" else column
        return f"{place}.fields: {{prompt: {column}}}" if column else f"a row is {SHAPES[format]}"
    if format == "prompt_completion" and not missing and "label" in columns:
        return LIKED
    if not columns or not missing:
        return f"a row is {SHAPES[format]}"
    for other, (required, _) in READS.items():
        if format in READS and other != format and all(name in columns for name in required):
            return f"{place}.format: {other}"
    synonyms = {name: synonym for name in missing if (synonym := _synonym(name, columns))}
    if len(synonyms) == len(missing) and len(set(synonyms.values())) == len(synonyms):
        named = {name: column for name, column in {**fields, **synonyms}.items() if name != column}
        if not named:
            line = "remove data.fields" if place == "data" else f"{place}.fields: {{}}"
            return f"{line}: the columns have the format's own names"
        return f"{place}.fields: {{{', '.join(f'{name}: {column}' for name, column in named.items())}}}"
    if format == "chat":
        asked = advice("instruction", {}, columns, place)
        if asked.startswith(f"{place}.fields: "):
            return f"{place}.format: instruction, and {asked}"
    return (
        f"it has {', '.join(map(repr, columns))}: say with {place}.fields which column is which, as in "
        f"{{{', '.join(f'{name}: COLUMN' for name in missing)}}}"
    )


def asking(columns: Sequence[str], place: str = "data") -> str:
    """Return the advice for rows that have pictures in a column, and no question about them in the format.

    Args:
        columns, place: as in `advice`.
    """
    named = advice("instruction", {}, columns, place)
    if named.startswith(f"{place}.fields: "):
        return f"{place}.format: instruction, and {named}"
    shown = next((column for column in (*PICTURES, *columns) if column in columns), "images")
    question = _synonym("instruction", columns)
    others = [column for column in columns if column not in (shown, question)]
    answer = _synonym("output", others) or next(iter(others), "text")
    asked = '"..."' if question is None else f'row["{question}"]'
    return (
        f'{place}.format: instruction, with data.transform: "asked.py:asked", where asked.py is\n'
        "def asked(row):\n"
        f'    return {{"instruction": {asked}, "output": row["{answer}"], "images": row["{shown}"]}}'
    )


def _synonym(name: str, columns: Sequence[str]) -> str | None:
    lowered = {column.lower(): column for column in reversed(columns)}
    return next((lowered[word] for word in (name, *NAMES[name]) if word in lowered), None)


def balance(liked: int, others: int, weights: tuple[float, float]) -> tuple[str, str] | None:
    """Return a remark on the balance of desirable answers, by the rule of TRL's KTOTrainer: eq. 8 of
    Ethayarajh et al. 2024, which keeps the two kinds' losses between 1 : 1 and 4 : 3.

    Args:
        liked, others: number of desirable and of undesirable answers; at least one in total.
        weights: train.desirable_weight and train.undesirable_weight.

    Returns:
        A sentence, and what to do; None if the balance is good.
    """
    if not liked or not others:
        kind = "desirable" if liked else "undesirable"
        what = "add answers of the other kind" + (", or learn these with objective: sft" if liked else "")
        return f"all {liked + others} answers are {kind}: there are no others to compare them with", what
    desirable, undesirable = weights
    low, high = (round(others * undesirable / liked * ratio, 2) for ratio in (1, 1.33))
    least, most = (round(liked * desirable / others / ratio, 2) for ratio in (1.33, 1))
    if liked == others or low <= desirable <= high or least <= undesirable <= most:
        return None
    return (
        f"desirable answers are {liked} of {liked + others}: KTO asks for a desirable_weight from {low:g} to "
        f"{high:g}, or an undesirable_weight from {least:g} to {most:g}",
        f"desirable_weight: {low:g}" if low > 0 else f"undesirable_weight: {most:g}",
    )


def check_split(name: str, report: SplitReport, data: DataSettings) -> None:
    """Refuse a split with no usable rows, with too few, or with too many unusable ones.

    Args:
        name: name of the split.

    Raises:
        UserError
    """
    ratio = data.max_invalid_ratio
    if not report.kept:
        why = report.notes()[:3] or [f"data.transform returns None for {report.removed} of them"]
        raise UserError(
            f"none of the {report.read} rows of {name} can be used: " + "; ".join(why),
            _remedy(report, data),
        )
    if report.invalid > ratio * report.read:
        first = [note for note in report.notes() if ": too long: " not in note][:3]
        raise UserError(
            f"{report.invalid} of {report.read} rows of {name} cannot be used, more than "
            f"data.max_invalid_ratio {ratio:g} allows; the first: " + "; ".join(first),
            _remedy(report, data),
        )
    if report.incomplete.count > ratio * report.read:
        raise UserError(
            f"{report.incomplete.count} of {report.read} rows of {name} contain text that the model would "
            "not see, "
            f"more than data.max_invalid_ratio {ratio:g} allows: {report.leftover}",
            leftover(data.format, data.fields, report.unused),
        )


def _remedy(report: SplitReport, data: DataSettings) -> str:
    problems = [report.malformed, report.empty, report.inconsistent, report.masked]
    problems += [] if report.kept else [report.overlong]  # too long ones are no fault where others are kept
    commonest = max(problems, key=lambda p: p.count)
    if not commonest.count:
        return "data.transform returns the rows that are to be kept; or raise data.stream_window"
    if commonest is report.overlong:
        if "prompt" in data.formats:
            return "raise train.grpo.max_prompt_length"
        ways = "split or truncate" if "text" in data.formats else "truncate"
        return f"raise data.max_length, or set data.overlong to {ways}"
    if ENDS_WITH_ANSWER in commonest.first[0].reason:
        return WITHOUT_ANSWER
    if NO_SYSTEM in commonest.first[0].reason:
        return folding(data.format, data.fields)
    if TEXT_AND_CALLS in commonest.first[0].reason:
        return silencing(data.fields)
    if commonest is report.masked and report.masked.first[0].reason.startswith("the chat template"):
        return WRITTEN
    if commonest is report.inconsistent:
        if "token in common" in commonest.first[0].reason:
            return "move the white space at the prompts' ends to the completions' beginnings"
        return (
            "use a chat template with {% generation %} markers around what the assistant writes "
            "(data.chat_template), or data.loss_on: last_assistant"
        )
    return (
        "see the first reasons: repair those rows, or raise data.max_invalid_ratio to continue without them"
    )
