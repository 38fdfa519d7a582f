"""Ready reward functions: for answers that a column has, for forms, lengths and code.

Each is a function of its options that returns the score of a completion: 1 for a right one and 0 for a wrong
one, or a share where it says so. An empty completion scores 0.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from typing import Any

from ..errors import UserError, first_line
from .sandbox import Isolation, run_tests

Score = Callable[..., float]
"""(a completion's text, the value of the column) -> the score. Without a column, (text) -> the score."""


def exact_match(ignore_case: bool = False) -> Score:
    """Compare the whole completion with the answer, apart from white space at both ends."""

    def score(text: str, answer: Any) -> float:
        left, right = text.strip(), str(answer).strip()
        return float(left.casefold() == right.casefold() if ignore_case else left == right)

    return score


def numeric_match(tolerance: float = 1e-6) -> Score:
    """Compare the last number of the completion with that of the answer. After the last "####", as in GSM8K,
    the first number counts.

    Numbers may have thousands separators, a currency sign, an exponent or a denominator. With a percent sign,
    50% equals 50 and 0.5.

    Args:
        tolerance: the largest difference that counts as equal: relative to the answer if that is above 1.
    """
    if not tolerance >= 0:
        raise UserError(f"tolerance is {tolerance}", "set it to 0 or more")

    def score(text: str, answer: Any) -> float:
        wanted = number_in(str(answer))
        if wanted is None:
            raise UserError(
                f"the answer {str(answer)[:80]!r} has no number",
                "use a column with numbers, or exact_match or boxed_answer for other answers",
            )
        value = number_in(text)
        return float(value is not None and _equal(value, wanted, tolerance))

    return score


def boxed_answer() -> Score:
    r"""Compare what is in the last \boxed{...} of the completion with the answer, which may be the text in
    the box, or a solution that has one, as in MATH.

    Both are compared as numbers where they are numbers, and else as texts without spacing and sizes of LaTeX.
    Two forms of an expression, such as x+1 and 1+x, are not equal.
    """

    def score(text: str, answer: Any) -> float:
        value = boxed(text)
        if value is None:
            return 0.0
        wanted = boxed(str(answer))
        left, right = _plain(value), _plain(str(answer) if wanted is None else wanted)
        if left == right and left:
            return 1.0
        if not (_NUMBER.fullmatch(left) and _NUMBER.fullmatch(right)):
            return 0.0
        number, other = number_in(left), number_in(right)
        return float(number is not None and other is not None and _equal(number, other, 1e-6))

    return score


def format_match(pattern: str) -> Score:
    """Test whether a regular expression matches the whole completion, apart from white space at both ends. A
    dot also matches the ends of lines.

    Args:
        pattern: in Python's syntax.
    """
    try:
        expression = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(f"has a wrong pattern {pattern!r}: {error}", "correct it; see Python's re") from error
    return lambda text: float(expression.fullmatch(text.strip()) is not None)


def json_schema(schema: Mapping[str, Any] | None = None) -> Score:
    """Test whether the completion is JSON, alone or in one fenced block, that a JSON Schema accepts.

    Args:
        schema: None if a column has it for each completion, as an object or as JSON text.
    """
    try:
        import jsonschema
        from referencing import Registry
        from referencing.exceptions import Unresolvable
    except ImportError as error:
        raise UserError("needs the package jsonschema", "pip install jsonschema") from error

    def validator(schema: Any) -> Any:
        try:
            schema = json.loads(schema) if isinstance(schema, str) else schema
            kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
            kind.check_schema(schema)
        except (ValueError, jsonschema.SchemaError) as error:
            raise UserError(f"the JSON Schema is wrong: {first_line(error)}", "correct the schema") from error
        # An empty registry: nothing is fetched from an address in the schema.
        return kind(schema, registry=Registry())

    def score(text: str, answer: Any = schema) -> float:
        fenced = _FENCED.fullmatch(text.strip())
        try:
            value = json.loads(fenced[2] if fenced else text, parse_constant=_refuse)
            return float((fixed or validator(answer)).is_valid(value))
        except (ValueError, RecursionError):
            return 0.0
        except Unresolvable as error:
            raise UserError(
                f"the JSON Schema refers to another one: {first_line(error)}", "put it under $defs"
            ) from error

    fixed = None if schema is None else validator(schema)
    return score


def length(maximum: int, minimum: int = 0) -> Score:
    """Score lengths in tokens: 1 from the minimum to the maximum. Shorter completions score their share of
    the minimum, and longer ones the maximum's share of their length.

    Raises:
        UserError: the maximum is less than 1 or less than the minimum.
    """
    if maximum < 1 or not 0 <= minimum <= maximum:
        raise UserError(f"the minimum is {minimum} and the maximum {maximum}", "set 0 <= minimum <= maximum")

    def score(count: int) -> float:
        if count < minimum:
            return count / minimum
        return min(1.0, maximum / max(count, 1))

    return score


def code_tests(
    seconds: float = 10.0, memory_mebibytes: int = 512, all_tests: bool = False, setup: str = ""
) -> Score:
    """Run the code of a completion with the tests of a column, in a sandbox: `sandbox.py` says what it stops.

    The code is the last fenced block, or the whole completion without one. The column has a list of
    statements, as MBPP's test_list, or one text. The score is the share of tests that pass.

    Args:
        seconds: the time limit for the code of a completion with all its tests.
        memory_mebibytes: its memory limit.
        all_tests: score 1 only if all tests pass, and otherwise 0.
        setup: statements that run before the code, such as imports.
    """
    lock = threading.Lock()
    told = False

    def score(text: str, answer: Any) -> float:
        nonlocal told
        tests = [answer] if isinstance(answer, str) else answer
        if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
            raise UserError(
                f"the tests {str(answer)[:80]!r} are not texts",
                "use a column of texts, or of lists of texts",
            )
        code = code_of(text)
        if not code.strip():
            return 0.0
        result = run_tests(f"{setup}\n{code}", tests, seconds, memory_mebibytes * 2**20)
        with lock:
            if not told and result.isolation is not None:
                told = True
                _tell_missing(result.isolation)
        share = sum(result.passed) / len(tests)
        return float(share == 1) if all_tests else share

    return score


def _tell_missing(isolation: Isolation) -> None:
    """Print what this system does not let the sandbox stop; it is shown as a note."""
    missing = {
        "the network": isolation.network,
        "writing files": isolation.files,
        "signals to other processes": isolation.signals,
    }
    open_ways = [what for what, stopped in missing.items() if not stopped]
    if open_ways:
        print(f"this system does not let the sandbox keep code from: {', '.join(open_ways)}")


@dataclass(frozen=True)
class ReadyReward:
    """A ready reward.

    Attributes:
        make: (options) -> the score of a completion.
        column: whether it needs a column; None if a column may replace an option.
        tokens: whether it scores the number of tokens instead of the text.
        parallel: whether it waits for processes, so that several completions are scored at the same time.
    """

    make: Callable[..., Score]
    column: bool | None = True
    tokens: bool = False
    parallel: bool = False


READY_REWARDS = {
    "exact_match": ReadyReward(exact_match),
    "numeric_match": ReadyReward(numeric_match),
    "boxed_answer": ReadyReward(boxed_answer),
    "format_match": ReadyReward(format_match, column=False),
    "json_schema": ReadyReward(json_schema, column=None),
    "length": ReadyReward(length, column=False, tokens=True),
    "code_tests": ReadyReward(code_tests, parallel=True),
}


def ready_reward(name: str, column: str | None, options: Mapping[str, Any]) -> Callable[..., list[float]]:
    """Return a ready reward as a function that is called as TRL calls them.

    Args:
        name: of READY_REWARDS.
        column: the column that it compares with.

    Raises:
        UserError: the options or the column are wrong. The function also raises it, for values of the column.
    """
    ready = READY_REWARDS[name]
    if ready.column and column is None:
        raise UserError("needs the column with the answers", "name a column of the data")
    if ready.column is False and column is not None:
        raise UserError(f"compares with no column, but {column} is set", "remove the column")
    try:
        inspect.signature(ready.make).bind(**options)
    except TypeError as error:
        known = ", ".join(inspect.signature(ready.make).parameters) or "none"
        raise UserError(f"has wrong options: {error}", f"its options: {known}") from error
    if name == "json_schema" and (column is None) == (options.get("schema") is None):
        raise UserError("needs a schema", "set either schema, or the column that has one for each row")
    score = ready.make(**options)

    def reward(
        completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **columns: Sequence[Any]
    ) -> list[float]:
        values: list[Any] = (
            [len(ids) for ids in completion_ids] if ready.tokens else [text_of(text) for text in completions]
        )
        rows = [(value,) for value in values]
        if column is not None:
            if column not in columns:
                names = sorted(set(columns) - {"prompts"})
                close = difflib.get_close_matches(column, names)
                raise UserError(
                    f"the data has no column {column}",
                    f"did you mean {close[0]}?" if close else f"its columns: {', '.join(names) or 'none'}",
                )
            rows = list(zip(values, columns[column], strict=True))  # type: ignore[arg-type]
        if not ready.parallel:
            return [score(*row) for row in rows]
        with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
            return list(threads.map(lambda row: score(*row), rows))

    return reward


def text_of(completion: Any) -> str:
    """Return a completion's text: of a conversation, the content of the last message."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else ""
    return content if isinstance(content, str) else ""


_FENCED = re.compile(r"```([\w+-]*)[ \t]*\n(.*?)```", re.DOTALL)


def code_of(text: str) -> str:
    """Return the last fenced block of Python or of no language, or the text if it has no fence."""
    blocks = [code for language, code in _FENCED.findall(text) if language.lower() in ("", "python", "py")]
    if blocks:
        return blocks[-1]
    return "" if "```" in text else text


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def boxed(text: str) -> str | None:
    r"""Return what is in the last \boxed{...}, or None if it is missing or has no end."""
    _, opening, rest = text.rpartition(r"\boxed{")
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", rest if opening else "", re.DOTALL):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if not depth:
            return rest[: brace.start()]
    return None


_SPACING = re.compile(r"\\left|\\right|\\[!,;: ]|\\q?quad|\$|~|\s+")
_WRAPPED = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_SHORT_FRACTION = re.compile(r"\\[dt]?frac(\d)(\d)")


def _plain(text: str) -> str:
    """Return LaTeX without what does not change its meaning."""
    text = _WRAPPED.sub(r"\1", text)
    text = _SPACING.sub("", text).rstrip(".").replace(r"\%", "%")
    text = re.sub(r"\^\{?\\circ\}?", "", text)
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    return _FRACTION.sub(r"\1/\2", re.sub(r"\\[dt]frac", r"\\frac", text))


_NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)])[-+\u2212])?(?:\\?[$€£¥] ?(?P<inner>[-\u2212])?)?"
    r"(?P<number>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:[eE](?P<exponent>[-+]?\d{1,9})(?!\d))?"
    r"(?:/(?P<denominator>\d+(?:\.\d+)?)(?![\d/]))?(?P<percent> ?\\?%)?"
)
_MOST_DIGITS = 5_000
"""Numbers with more digits are rounded to these."""


@dataclass(frozen=True)
class Number:
    """A number of a text.

    Attributes:
        value: without the percent sign.
        percent: whether it has one.
    """

    value: Decimal
    percent: bool


def number_in(text: str) -> Number | None:
    """Return the last number of a text, or the first after its last "####"; None without one."""
    text = _FRACTION.sub(r"\1/\2", text)
    _, marker, after = text.rpartition("####")
    matches = list(_NUMBER.finditer(after if marker else text))
    if not matches:
        return None
    match = matches[0 if marker else -1]
    context = _context(len(match[0]))
    digits = match["number"].replace(",", "")
    value = context.create_decimal(f"{digits}e{match['exponent'] or 0}")
    if match["denominator"]:
        value = context.divide(value, context.create_decimal(match["denominator"]))
    negative = (match["sign"] or "+") in "-\u2212" or match["inner"]
    return Number(context.minus(value) if negative else value, bool(match["percent"]))


def _context(digits: int) -> Context:
    """Return a context in which no operation raises an exception."""
    return Context(prec=min(max(50, digits), _MOST_DIGITS), Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])


def _equal(value: Number, wanted: Number, tolerance: float) -> bool:
    """Return whether numbers are equal. If one has a percent sign, a hundredth of it may be equal, too."""
    context = _context(2 * max(len(value.value.as_tuple().digits), len(wanted.value.as_tuple().digits)))
    lefts = [value.value]
    rights = [wanted.value]
    if value.percent and not wanted.percent:
        lefts.append(context.divide(value.value, Decimal(100)))
    elif wanted.percent and not value.percent:
        rights.append(context.divide(wanted.value, Decimal(100)))
    for left in lefts:
        for right in rights:
            if not (left.is_finite() and right.is_finite()):
                continue
            limit = context.multiply(Decimal(tolerance), max(Decimal(1), context.abs(right)))
            if context.abs(context.subtract(left, right)) <= limit:
                return True
    return False
