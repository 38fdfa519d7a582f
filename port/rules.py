"""Rules that several dialects have. Each function makes one, for the list of a dialect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from recipec.port.common_keys import say_common, say_start, say_tokens
from recipec.port.engine import Rule, Says
from recipec.port.keys import OFF, Row, table
from recipec.port.meaning import experts, images, model_names, templates, training
from recipec.port.meaning.run import Run
from recipec.port.tool_names import known
from recipec.runtime.model.families.towers import kind_of


@dataclass(frozen=True)
class Follow:
    """A rule that states what a table says of the keys of sections.

    Attributes:
        table: the rows.
        sections: the sections, "" for the file itself.
        off: values at which a key does nothing, in addition to those of its row.
    """

    table: tuple[Row, ...]
    sections: tuple[str, ...] = ("",)
    off: tuple[Any, ...] = ()

    def __call__(self, run: Run) -> Says:
        for section in self.sections:
            yield from run.section(section).follow(self.table, self.off)


def follow(rows: str | Iterable[Row], *sections: str, off: tuple[Any, ...] = ()) -> Follow:
    """State what a table, or the text of its rows, says of the keys of sections; see `Follow`."""
    return Follow(table(rows) if isinstance(rows, str) else tuple(rows), sections or ("",), off)


def common(tool: str, *sections: str, off: tuple[Any, ...] = OFF) -> Rule[Run]:
    """State the keys of sections that mean the same in every tool, "" or none for the file itself."""

    def rule(run: Run) -> Says:
        for section in sections or ("",):
            yield from say_common(run.section(section), tool, off)

    return rule


def mappings(*names: str, section: str = "") -> Rule[Run]:
    """State what empty sections are, and refuse those that are no mappings."""
    return lambda run: run.section(section).mappings(names)


def passive(names: Iterable[str], note: str, section: str = "") -> Rule[Run]:
    """State that keys do not affect the run's numbers. The note says why."""
    keys = tuple(names)
    return lambda run: run.section(section).passive(keys, note)


def unused(names: Iterable[str], note: str, section: str = "") -> Rule[Run]:
    """State that the source's run does not read keys. The note says why."""
    keys = tuple(names)
    return lambda run: run.section(section).unused(keys, note)


def directory(key: str, section: str = "") -> Rule[Run]:
    """State the key of the folder for results."""
    return lambda run: training.directory(run.section(section), key)


def model(key: str, revision: str) -> Rule[Run]:
    """State the keys that name the model and its revision. Later rules have the model in `run.named`."""

    def rule(run: Run) -> Says:
        run.named = yield from model_names.say_model(run.keys, key, revision)

    return rule


def balance(key: str, *families: str) -> Rule[Run]:
    """State the coefficient of the load-balancing loss, which the tool adds for some families, or for all."""
    return lambda run: experts.say_coefficient(run.keys, key, run.model, families)


def start(key: str, of_base: bool = False) -> Rule[Run]:
    """State the key that names an adapter to start from.

    Args:
        of_base: whether the tool's reference is the model without the adapter.
    """
    return lambda run: say_start(run.keys, key, of_base=of_base)


def tokens(key: str, resizes: str = "") -> Rule[Run]:
    """State the key that lists new tokens, with LLaMA-Factory's key that resizes the vocabulary."""
    return lambda run: say_tokens(run.keys, key, resizes)


TEMPLATE, SOURCES = "data.chat_template", "data.train"


def places(run: Run) -> Says:
    """Let the templates that a port has written write the places of pictures too, as the model's own does."""
    model, ledger = run.model, run.ledger
    if model is None or not images.trained_on(run.keys):
        return
    place = known("places").get(kind_of({**model.config, **model.multimodal}), "")
    shared = ledger.value(TEMPLATE)
    if isinstance(shared, str) and (template := templates.with_places(shared, place)):
        yield run.keys.sets(TEMPLATE, template)
    sources = ledger.value(SOURCES)
    source_templates = [
        source.get("chat_template") for source in sources or () if isinstance(source, Mapping)
    ]
    if any(isinstance(text, str) and templates.with_places(text, place) for text in source_templates):
        yield run.keys.sets(SOURCES, [_placed(source, place) for source in sources])


def _placed(source: Any, place: str) -> Any:
    text = source.get("chat_template") if isinstance(source, Mapping) else None
    template = templates.with_places(text, place) if isinstance(text, str) else None
    return {**source, "chat_template": template} if template else source
