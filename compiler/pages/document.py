"""A document of sections with paragraphs, facts, tables and plots, which a command builds once.

The modules `text`, `markdown` and `html` write it. A terminal does not show what is marked as a `detail`, and
only the excerpt of a table that has one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar


@dataclass(frozen=True)
class Figure:
    """A figure with its unit, its label, and lines below it; `bad` marks a figure with a problem."""

    name: str
    value: str
    below: tuple[str, ...] = ()
    bad: bool = False


@dataclass(frozen=True)
class Text:
    """A paragraph; `look` is "", "muted", "alarm", "heading", or "code", which keeps its lines."""

    words: str
    look: str = "muted"
    detail: bool = False
    kind: ClassVar[str] = "text"


@dataclass(frozen=True)
class Items:
    """A list of sentences."""

    items: Sequence[str]
    detail: bool = False
    kind: ClassVar[str] = "items"


@dataclass(frozen=True)
class Facts:
    """Names and values; the values are text or numbers. A terminal shows those of one `line` next to each
    other."""

    pairs: Collection[tuple[str, Any]]
    title: str = ""
    line: bool = False
    detail: bool = False
    kind: ClassVar[str] = "facts"


@dataclass(frozen=True)
class Excerpt:
    """The part of a table that a terminal shows.

    Attributes:
        rows: number of rows, from the top.
        columns: indices of the columns; () for all.
        rest: what the other rows are together, as the end of a sentence: "30.0 ms together".
    """

    rows: int
    columns: Sequence[int] = ()
    rest: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of text; the first column holds names.

    Attributes:
        words: indices of the columns that hold text; all others except the first hold numbers.
        label: description for screen readers.
        folded: the text of the control that unfolds it; "" for a table that is always open.
        bad: indices of rows that have a problem.
        excerpt: what a terminal shows of it; None for all.
        code: indices of the columns that hold code, such as keys.
        remarks: a sentence for each row, or "". A terminal shows it below the row, pages in a last column.
        links: for each row, the id of the line of a `Listing` that its first code links to, or "".
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    words: Sequence[int] = ()
    label: str = ""
    folded: str = ""
    bad: tuple[int, ...] = ()
    excerpt: Excerpt | None = None
    detail: bool = False
    code: Sequence[int] = ()
    remarks: Sequence[str] = ()
    links: Sequence[str] = ()
    kind: ClassVar[str] = "table"

    @property
    def with_remarks(self) -> Table:
        """Return the table with its remarks as the last column."""
        if not self.remarks:
            return self
        rows = [[*row, remark] for row, remark in zip(self.rows, self.remarks, strict=True)]
        last = len(self.head)
        return replace(self, head=[*self.head, "note"], rows=rows, words=[*self.words, last], remarks=())


@dataclass(frozen=True)
class Plot:
    """A plot that plotly draws.

    Attributes:
        key: the element's id, unique in the page.
        title, what: the heading, and a sentence on what the plot shows.
        data, layout: in plotly's form. Texts in them are escaped, because plotly reads them as markup.
        height: pixels.
        after: blocks below it: notes, and the table of its numbers.
    """

    key: str
    title: str
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any] = field(default_factory=dict)
    height: int = 320
    what: str = ""
    after: Sequence[Any] = ()
    kind: ClassVar[str] = "plot"


@dataclass
class Line:
    """A line of a `Listing`.

    Attributes:
        id: of its element, unique in the page.
        mark: what the line is marked with: "approximated", "unsupported", or "".
        links: ids and numbers of the lines that it is related to; its text links to the first.
        notes: sentences below it.
    """

    text: str
    number: int
    id: str
    mark: str = ""
    links: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Listing:
    """The lines of a file."""

    name: str
    lines: Sequence[Line]


@dataclass(frozen=True)
class Sides:
    """Files next to each other, whose lines link to each other. Only HTML shows them."""

    left: Sequence[Listing]
    right: Sequence[Listing]
    kind: ClassVar[str] = "sides"


@dataclass(frozen=True)
class Picture:
    """A picture of a `Gallery`.

    Attributes:
        source: a data: address.
        caption: a sentence below it, which also describes it to screen readers.
    """

    source: str
    caption: str


@dataclass(frozen=True)
class Gallery:
    """Pictures next to each other. Only HTML shows them; other writers list the captions."""

    pictures: Sequence[Picture]
    kind: ClassVar[str] = "gallery"


Block = Text | Items | Facts | Table | Plot | Sides | Gallery


@dataclass(frozen=True)
class Section:
    """A part of the document.

    Attributes:
        key: the id of its heading in HTML; "" without a heading.
        title: its heading; "" for none.
        aside: sentences that introduce it; HTML shows them next to the heading.
        detail: as of a block.
    """

    key: str
    title: str
    aside: Sequence[str]
    blocks: Sequence[Block]
    detail: bool = False


@dataclass(frozen=True)
class Document:
    """What a command tells, for every writer.

    Attributes:
        name: its heading; "" for none.
        hardware: names and values below the heading.
        figures: the most important figures.
        alarms: problems that must not be missed: a word and a sentence each.
        sentence: below the alarms.
        title: of the browser window, in HTML.
        generator: identifies the HTML pages of one command, so that no other file is overwritten.
        command: the command that made it; the text of its badge in HTML.
    """

    name: str
    sections: Sequence[Section]
    hardware: Sequence[tuple[str, str]] = ()
    figures: Sequence[Figure] = ()
    alarms: Sequence[tuple[str, str]] = ()
    sentence: str = ""
    title: str = ""
    generator: str = ""
    command: tuple[str, str] = ("", "")


def sheet(name: str, *parts: Sequence[Block]) -> Document:
    """Return a document whose sections have no headings."""
    return Document(name, [Section("", "", (), blocks) for blocks in parts])
