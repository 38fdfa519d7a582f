"""Check that enough rows of a split are usable."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UserError
from ..settings import DataSettings
from .advice import WRITTEN, folding, leftover, silencing
from .epochs import PackedRows
from .masking import NO_SYSTEM, TEXT_AND_CALLS
from .report import SplitReport
from .samples import Samples


def count_rows(report: SplitReport, rows: Sequence[PackedRows], samples: Samples) -> None:
    """Record how full the rows of an epoch are."""
    lengths = samples.lengths.reshape(-1, samples.group).sum(1)
    report.group = samples.group
    report.rows = sum(map(len, rows)) * samples.group
    report.row_tokens = sum(int(lengths[one.samples].sum()) for one in rows)


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
        ways = "split or truncate" if "text" in data.formats else "truncate"
        return f"raise data.max_length, or set data.overlong to {ways}"
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
