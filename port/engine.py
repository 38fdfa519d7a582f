"""Apply a dialect's rules: record what they say of the source's keys, once each, in the order of the rules.

A dialect is a list of rules. A rule reads keys of a run, and yields a Statement for each key that it knows:
what the recipe gets, or why not. `Keys` of keys.py reads values and makes statements, which this module alone
records. rules.py makes the rules that several dialects have.

The first statement on a key counts. A later one says nothing more of the key, but a value that it has for the
recipe is set, so that a rule can say what several keys together become.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, TypeVar

from recipec.spec.key_paths import split
from recipec.spec.structure import field_at

if TYPE_CHECKING:
    from recipec.port.keys import Keys
    from recipec.spec.codes import Code

Value = TypeVar("Value")
Run = TypeVar("Run", contravariant=True)


class Verb(Enum):
    """What a statement says of a key, or does to the recipe.

    GETS: the recipe gets values: exact, approximated if there is a note, the tool's default if it is absent.
    SAME: the key means the same; the note is additional information.
    DEFAULT: as GETS, for a key whose default the tool computes: `value`.
    UNUSED: the source's run does not read the key; the note says why.
    UNLESS: there is no counterpart, which matters unless the value is in `idle`.
    LEARNED: as UNLESS, but the run would learn something else: an error.
    ANEW: if on, the run starts from new weights: an error.
    REFUSED: the run cannot do without the key: an error with `refusal`.
    DIFFERS: as GETS with a note, even if the value is null.
    COVERED: what is said of the section that the key is in covers the key.
    WITHDRAWN: what was said of the key before does not count: the next statement on it does.
    DEFAULTED: a default of the tool that no key of the section has, with its name as the key.
    SETS: the recipe gets a value that several keys decide; `key` is its path, and the note its comment.
    AMENDS: the note and the verdict `value` hold for all keys that set the recipe's path `key`.
    MOVES: the keys that set the recipe's path `key` set the path `value` instead.
    MEANS: a micro-batch's mean is over `value` rows.
    WARNS: a diagnostic, `value`, that is no error.
    FILE: the recipe needs a file of the name `key`, with the text `value`.
    """

    GETS = auto()
    SAME = auto()
    DEFAULT = auto()
    UNUSED = auto()
    UNLESS = auto()
    LEARNED = auto()
    ANEW = auto()
    REFUSED = auto()
    DIFFERS = auto()
    COVERED = auto()
    WITHDRAWN = auto()
    DEFAULTED = auto()
    SETS = auto()
    AMENDS = auto()
    MOVES = auto()
    MEANS = auto()
    WARNS = auto()
    FILE = auto()


@dataclass(frozen=True)
class Statement:
    """What a rule says of one key of a section; the methods of Keys make them."""

    section: Keys
    verb: Verb
    key: str = ""
    sets: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    value: Any = None
    idle: tuple[Any, ...] = ()
    refusal: tuple[Code, str, str] | None = None


Statements = Generator[Statement, None, Value]
"""Statements, and a value for the function that asks for them by `yield from`."""
Says = Statements[None]
"""Statements alone."""
Rule = Callable[[Run], Says]
"""A rule of a dialect, whose argument is the run that it reads."""


def apply(rules: Iterable[Rule[Run]], run: Run) -> None:
    """Record everything that rules say of a run, in their order."""
    for rule in rules:
        collect(rule(run))


def collect(statements: Statements[Value]) -> Value:
    """Record statements, and return their value."""
    while True:
        try:
            statement = next(statements)
        except StopIteration as stop:
            value: Value = stop.value
            return value
        record(statement)


def record(statement: Statement) -> None:
    """Write a statement into its section's ledger."""
    section, key, note = statement.section, statement.key, statement.note
    ledger, source, path = section.ledger, section.source, section.prefix + key
    match statement.verb:
        case Verb.SETS:
            ledger.set(key, statement.value, note)
            return
        case Verb.AMENDS:
            ledger.amend(key, statement.value, note)
            return
        case Verb.MOVES:
            ledger.move(key, statement.value)
            return
        case Verb.MEANS:
            ledger.means = statement.value
            return
        case Verb.WARNS:
            ledger.diagnostics.append(statement.value)
            return
        case Verb.FILE:
            ledger.files[key] = statement.value
            return
        case Verb.DEFAULTED:
            ledger.defaulted(key, statement.value, statement.sets, note)
            return
        case Verb.COVERED:
            section.stated.add(key)
            return
        case Verb.WITHDRAWN:
            section.stated.discard(key)
            return
        case Verb.UNLESS | Verb.LEARNED | Verb.ANEW:
            _switch(statement)
            return
    stated = key in section.stated
    section.stated.add(key)
    if statement.sets and not section.given(key):
        sets = {path: value for path, value in statement.sets.items() if not automatic(path)}
        statement = replace(statement, sets=sets)
        if not sets and not section.stands(key):
            return
    if stated:
        _set(statement)
    elif statement.verb is Verb.DIFFERS:
        ledger.approximated(source, path, statement.sets, note)
    elif statement.refusal is not None:
        ledger.refused(source, path, *statement.refusal)
    elif statement.verb is Verb.UNUSED:
        if section.stands(key):
            ledger.unused(source, path, note)
    elif statement.verb is Verb.SAME and section.stands(key):
        ledger.exact(source, path, statement.sets, note)
    elif statement.verb is Verb.DEFAULT and not section.given(key):
        note = note or f"{section.tool}'s default"
        if section.stands(key):
            ledger.exact(source, path, statement.sets, f"null: the same as without the key; {note}")
        else:
            ledger.defaulted(path, statement.value, statement.sets, note)
    elif section.given(key):
        if note and statement.verb is Verb.GETS:
            ledger.approximated(source, path, statement.sets, note)
        else:
            ledger.exact(source, path, statement.sets)
    elif section.stands(key):
        ledger.exact(source, path, statement.sets, f"null: the same as without the key{note and '; ' + note}")
    elif statement.sets:
        whose = f"{section.tool}'s default"
        more = note and statement.verb is Verb.GETS
        ledger.defaulted(path, section.value(key), statement.sets, f"{whose}; {note}" if more else whose)


def automatic(path: str) -> bool:
    """Return whether the recipe's compiler chooses a value by itself, for the model and the machine.

    A tool's default for it is for GPUs, so it is not taken over; what a file gives is.
    """
    known = field_at(split(path))
    return known is not None and known.default == "auto"


def _set(statement: Statement) -> None:
    if statement.verb in (Verb.GETS, Verb.SAME, Verb.DEFAULT, Verb.DIFFERS):
        for path, value in statement.sets.items():
            statement.section.ledger.set(path, value)


def _switch(statement: Statement) -> None:
    """Record a key without a counterpart by whether it is on."""
    section, key = statement.section, statement.key
    if key in section.stated or not section.stands(key):
        return
    value = section.value(key)
    if not section.given(key) or any(value is idle or value == idle for idle in statement.idle):
        record(section.same(key, note="off"))
    elif statement.verb is Verb.UNLESS:
        section.ledger.unsupported(section.source, section.prefix + key, statement.note)
        section.stated.add(key)
    elif statement.refusal is not None:
        record(section.refuse(key, *statement.refusal))
