"""Count what happened to the rows of a data set."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from .columns import Unread

NAMED = 5
"""Number of left-out rows that are named; the others are only counted."""


@dataclass(frozen=True)
class UnusableRow:
    """A row that was left out: its FILE:LINE, and the reason."""

    origin: str
    reason: str


@dataclass
class Problems:
    """Rows left out for one kind of reason: their number, and the first of them."""

    count: int = 0
    first: list[UnusableRow] = field(default_factory=list)

    def add(self, origin: str, reason: str) -> None:
        self.count += 1
        if len(self.first) < NAMED:
            self.first.append(UnusableRow(origin, reason))

    def merge(self, other: Problems) -> None:
        self.count += other.count
        self.first = (self.first + other.first)[:NAMED]


KINDS = {
    "malformed": "malformed",
    "empty": "empty",
    "inconsistent": "unclear targets",
    "masked": "no targets",
    "overlong": "too long",
}
"""Reasons for leaving rows out: the attribute of SplitReport, and its words."""

COUNTS = (
    *("read", "kept", "removed", "truncated", "split", "pieces", "lone_ends", "substituted", "unended"),
    *("tokens", "targets", "pictures", "picture_tokens"),
)
"""The attributes of SplitReport that are plain numbers, and are added up."""

KEPT = ("incomplete", "controlled")
"""The attributes of SplitReport with rows that are kept."""

INVALID = ("malformed", "empty", "inconsistent", "masked")
"""The reasons that count for data.max_invalid_ratio."""

ADAPTED = {
    "json": "the chat template takes the arguments of tool calls as JSON text",
    "null": "the chat template writes tool calls only in a message whose content is null, not empty",
    "apart": "the chat template writes the text of a message after its tool calls, so the text is given as a "
    "message of its own before them",
    "unopened": "the text before </think> or <channel|> counts as reasoning, although nothing opens it",
}
"""The changes to a sample's messages, and why each is made: those of template.CallForm, and of reasoning."""

NAMED_COUNTS = ("unused", "texts", "values", "taken")
"""Attributes of SplitReport that count names of columns and keys, in the order of columns.Unread."""


def one_token(text: str) -> str:
    """Return the setting that makes a text one token of the tokenizer."""
    return f"model: {{add_tokens: {{{json.dumps(text, ensure_ascii=False)}: null}}}}"


@dataclass
class SplitReport:
    """Counts of `data.train` or of `data.eval`.

    Attributes:
        read: number of rows in the files.
        kept: samples that are trained or evaluated on.
        removed: rows that the transform left out.
        malformed: rows that do not match the format, or that the template refuses.
        empty: rows without text to learn.
        inconsistent: rows whose targets cannot be found in the template's rendering, or whose tokens lie
            across their border.
        masked: rows in which no token is a target.
        overlong: rows dropped for being longer than max_length, or for losing every target when cut.
        truncated: kept rows that were cut.
        split: kept texts that were split into samples of max_length tokens.
        pieces: the samples of these texts.
        shared: samples of an evaluation that are also trained on.
        lone_ends: split texts whose last token is left out: alone in a sample, nothing would predict it.
        substituted: kept rows in which a turn does not begin in the way the generation prompt does.
        unended: kept rows in which a turn ends in no token of its own.
        ends: the number of answers by the token, as text, that ends them.
        spelled_ends: the number of answers by the text of several tokens that ends them.
        incomplete: kept rows with content that their rendering does not use, with its names.
        unused: the number of rows by such a name.
        controlled: kept rows whose data holds control tokens that act as such, with their texts.
        control: the number of rows by such a token.
        adapted: the number of kept rows by the change to their messages, of ADAPTED.
        texts, values, taken: the number of kept rows by the name of a column or of a message's key: with text
            that is not used, with a value that is not used, and read as a role of another name.
        tokens, targets: of the kept samples.
        pictures, picture_tokens: of the kept samples: pictures, and the tokens that stand for them.
        longest: tokens of the longest kept sequence.
        rows: rows of max_length tokens that an epoch fills.
        row_tokens: tokens in those rows; more or fewer than `tokens` where sources have weights.
        row_length: max_length.
        row_patches: patches of pictures that a row has room for.
        patches: in those rows.
        group: token sequences of a sample; the two answers of a preference have one each.
    """

    read: int = 0
    kept: int = 0
    removed: int = 0
    malformed: Problems = field(default_factory=Problems)
    empty: Problems = field(default_factory=Problems)
    inconsistent: Problems = field(default_factory=Problems)
    masked: Problems = field(default_factory=Problems)
    overlong: Problems = field(default_factory=Problems)
    truncated: int = 0
    split: int = 0
    pieces: int = 0
    lone_ends: int = 0
    shared: int = 0
    substituted: int = 0
    unended: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    spelled_ends: dict[str, int] = field(default_factory=dict)
    incomplete: Problems = field(default_factory=Problems)
    unused: dict[str, int] = field(default_factory=dict)
    controlled: Problems = field(default_factory=Problems)
    control: dict[str, int] = field(default_factory=dict)
    adapted: dict[str, int] = field(default_factory=dict)
    texts: dict[str, int] = field(default_factory=dict)
    values: dict[str, int] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    targets: int = 0
    pictures: int = 0
    picture_tokens: int = 0
    longest: int = 0
    rows: int = 0
    row_tokens: int = 0
    row_length: int = 0
    row_patches: int = 0
    patches: int = 0
    group: int = 1

    def merge(self, other: SplitReport) -> None:
        """Add the counts of the following rows. `rows` and the values derived from it stay unchanged."""
        for name in (*KINDS, *KEPT):
            getattr(self, name).merge(getattr(other, name))
        for kind in (*NAMED_COUNTS, "adapted", "control", "ends", "spelled_ends"):
            counts = getattr(self, kind)
            for name, count in getattr(other, kind).items():
                counts[name] = counts.get(name, 0) + count
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.longest = max(self.longest, other.longest)

    @property
    def invalid(self) -> int:
        """Return the number of rows that were unusable for a reason other than their length."""
        return sum(getattr(self, name).count for name in INVALID)

    def add_unread(self, origin: str, unread: Unread) -> None:
        """Count what a kept row contains that is not used."""
        if unread.parts:
            self.incomplete.add(origin, ", ".join(unread.parts))
        for kind, names in zip(NAMED_COUNTS, unread, strict=True):
            counts = getattr(self, kind)
            for name in names:
                counts[name] = counts.get(name, 0) + 1

    def add_control(self, origin: str, tokens: Iterable[str]) -> None:
        """Count a kept row whose data holds control tokens that act as such."""
        if tokens := list(dict.fromkeys(tokens)):
            self.controlled.add(origin, ", ".join(tokens))
            self.merge(SplitReport(control=dict.fromkeys(tokens, 1)))

    def add_adapted(self, names: Iterable[str]) -> None:
        """Count a kept row whose messages were changed, by keys of ADAPTED."""
        self.merge(SplitReport(adapted=dict.fromkeys(names, 1)))

    def add_ends(self, ends: Iterable[int | str]) -> None:
        """Count what ends the answers of a kept row, each as in `encoding.Encoded.end`."""
        for end in ends:
            if end != "":
                counts = self.ends if isinstance(end, int) else self.spelled_ends
                counts[str(end)] = counts.get(str(end), 0) + 1

    @property
    def leftover(self) -> str:
        """Return content that renderings do not use, each with its count, and the first such row."""
        return f"{_counted(self.unused)}; the first is {self.incomplete.first[0].origin}"

    @property
    def samples(self) -> int:
        """Return the number of samples: kept rows, with each piece of a text that was split."""
        return self.kept - self.split + self.pieces

    @property
    def mean_length(self) -> float:
        """Return the mean tokens of a kept sequence; each answer of a preference is one, with the prompt."""
        return self.tokens / (self.samples * self.group) if self.kept else 0.0

    @property
    def efficiency(self) -> float:
        """Return the share of the rows' positions that hold a token rather than padding."""
        return self.row_tokens / (self.rows * self.row_length) if self.rows else 0.0

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> SplitReport:
        """Build a report from the result of `to_dict`."""
        values = {item.name: value[item.name] for item in fields(cls)}
        for name in (*KINDS, *KEPT):
            problems = values[name]
            values[name] = Problems(
                problems["count"], [UnusableRow(**problem) for problem in problems["first"]]
            )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {
            **asdict(self),
            "samples": self.samples,
            "mean_length": round(self.mean_length, 2),
            "efficiency": round(self.efficiency, 4),
        }

    def sentence(self, name: str) -> str:
        """Return the counts as one paragraph."""
        left_out = [
            f"{problems.count:,} {what}"
            for problems, what in (
                (self.malformed, "malformed"),
                (self.empty, "empty"),
                (self.inconsistent, "with unclear targets"),
                (self.masked, "without targets"),
                (self.overlong, f"too long for {self.row_length:,} tokens"),
            )
            if problems.count
        ]
        left_out += [f"{self.removed:,} left out by the transform"] if self.removed else []
        fate = f" ({', '.join(left_out)})" if left_out else ""
        cut = f", {self.truncated:,} of them cut" if self.truncated else ""
        cut += f", {self.split:,} of them split into {self.pieces:,}" if self.split else ""
        pictures = ""
        if self.row_patches:
            filled = 100 * self.patches / (self.rows * self.row_patches) if self.rows else 0.0
            pictures = (
                f"; {self.pictures:,} pictures of {self.picture_tokens:,} tokens, in rows of "
                f"{self.row_patches:,} patches, {filled:.1f} % full"
            )
        targets = f", of which {self.targets:,} are targets" if self.targets else ""
        full = f"; {self.rows:,} rows of {self.row_length:,}, {100 * self.efficiency:.1f} % full"
        return (
            f"{name}: {self.kept:,} of {self.read:,} samples kept{fate}{cut}; {self.tokens:,} tokens"
            f"{targets}; mean length {self.mean_length:.0f}, longest {self.longest:,}"
            f"{full if self.rows else ''}{pictures}"
        )

    def notes(self) -> list[str]:
        """Return notes for the user on rows left out and on the template."""
        out = []
        for name, what in KINDS.items():
            problems: Problems = getattr(self, name)
            out += [f"{problem.origin}: {what}: {problem.reason}" for problem in problems.first]
            if problems.count > len(problems.first):
                out.append(f"... and {problems.count - len(problems.first):,} more, {what}")
        if self.lone_ends:
            out.append(
                f"{self.lone_ends:,} split texts: the last token is left out, because it would be alone in "
                "its sample, where nothing predicts it"
            )
        if self.incomplete.count:
            out.append(
                f"{self.incomplete.count:,} samples contain text that the model does not see: {self.leftover}"
            )
        if self.controlled.count:
            most = sorted(self.control.items(), key=lambda item: -item[1])
            counts = ", ".join(f"{token} in {count:,}" for token, count in most[:NAMED])
            more = f" and {len(most) - NAMED} more" if len(most) > NAMED else ""
            out.append(
                f"{self.controlled.count:,} samples contain control tokens in their own texts, and the model "
                f"reads them as such: {counts}{more}; the first is {self.controlled.first[0].origin}. "
                "data.special_tokens: text makes them ordinary text"
            )
        out += [f"{count:,} samples: {ADAPTED[name]}" for name, count in self.adapted.items()]
        if self.texts:
            out.append(f"text that is not used, in samples: {_counted(self.texts)}")
        if self.substituted:
            out.append(
                f"{self.substituted:,} samples: the chat template does not write an assistant turn the way "
                "its generation prompt begins one (it adds or strips reasoning); only the turn's own text "
                "and its end are targets"
            )
        for text, count in self.spelled_ends.items():
            out.append(
                f"warning: {count:,} samples end an answer with {text!r}, which is several tokens of this "
                f"tokenizer: no server and no chat stops there. {one_token(text)} makes it one token"
            )
        if self.unended > sum(self.spelled_ends.values()):
            out.append(
                f"{self.unended:,} samples: no special token ends an assistant turn's targets, so the model "
                "is not taught to stop; the chat template has to write one, inside its generation markers"
            )
        if self.taken:
            out.append(f"columns of other names that are read: {_counted(self.taken)}")
        if self.values:
            out.append(f"columns that are not used: {_counted(self.values)}")
        return out


def _counted(names: Mapping[str, int]) -> str:
    return ", ".join(f"{name} in {count:,}" for name, count in names.items())


@dataclass
class DataReport:
    """The report of `prepare`.

    Attributes:
        train, eval: the report of each split; `eval` is None without evaluation data.
        steps_per_epoch: optimizer steps of one pass; None for a stream, and then `train` covers one window.
        total_steps: optimizer steps of the run.
        packing: whether samples share rows.
        notes: notes on all training data.
        chooses: keys of the recipe that choose a step by the evaluation's loss.
    """

    train: SplitReport
    eval: SplitReport | None
    steps_per_epoch: int | None
    total_steps: int
    packing: bool
    notes: Sequence[str] = ()
    chooses: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {
            "train": self.train.to_dict(),
            "eval": self.eval.to_dict() if self.eval else None,
            "steps_per_epoch": self.steps_per_epoch,
            "total_steps": self.total_steps,
            "packing": self.packing,
            "notes": list(self.notes),
        }

    def text(self) -> str:
        """Return text for the terminal: a sentence per split, then a line for each reason of omission."""
        lines = []
        train = "train" if self.steps_per_epoch is not None else "train, one window of the stream"
        for name, split in ((train, self.train), ("eval", self.eval)):
            if split is not None:
                lines += [split.sentence(name), *(f"  {note}" for note in split.notes())]
        lines += [f"note: {note}" for note in self.notes]
        if self.eval is not None:
            window = "" if self.steps_per_epoch is not None else "the first window that was read"
            warning = evaluation_warning(self.eval.shared, self.eval.samples, self.chooses, window)
            lines += [f"warning: {warning}"] if warning else []
        an_epoch = "" if self.steps_per_epoch is None else f"{self.steps_per_epoch:,} an epoch, "
        lines.append(f"steps: {an_epoch}{self.total_steps:,} in all")
        return "\n".join(lines)


def evaluation_warning(count: int, samples: int, chooses: Sequence[str] = (), window: str = "") -> str:
    """Return what to say of evaluation samples that are trained on, "" if there are none.

    Args:
        count, samples: those that are trained on, and all.
        chooses: the recipe's keys that choose a step by the evaluation loss.
        window: the name of the window of a stream that they were compared with, "" for all training data.
    """
    if not count:
        return ""
    how = f"all {samples:,}" if count == samples else f"{count:,} of the {samples:,}"
    where = f", in {window}" if window else ""
    out = f"{how} evaluation samples are also trained on{where}: their loss says nothing about new samples"
    if chooses:
        out += f", and {' and '.join(chooses)} would choose the step that knows them best"
    return out
