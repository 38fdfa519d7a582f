"""The keys of a section of a ported file: read their values, and state what each becomes.

data/dialects.json lists the keys that the tools know, with types and defaults. scripts/dialects.py makes it.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any

from recipec.compiler.wording import listing
from recipec.port import refusals
from recipec.port.engine import Says, Statement, Verb, record
from recipec.port.ledger import Ledger, Verdict
from recipec.port.refusals import E1160, E1180
from recipec.port.source import MISSING, Source
from recipec.spec.codes import Code
from recipec.spec.core_schema import flow
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.validate import shown

TRUE, FALSE = ("true", "yes", "on", "1", "t", "y"), ("false", "no", "off", "0", "f", "n")
"""Switches as text: the quoted words of YAML 1.1, and those of accelerate's files."""


MOST = 1e30
"""Larger than any number that is meaningful in a config. Products of several such numbers are still finite
floats."""

DATA = Path(__file__).parent / "data" / "dialects.json"


OFF: tuple[Any, ...] = (None, False, 0, 0.0, "", "none", [], {})
"""Values at which a feature does nothing."""

REASONS = {
    "files": "it affects how files are found, read and kept, not their content",
    "part": "other keys decide it, or recipec does it in its own way",
    "log": "it affects logs and reports, not training",
    "speed": "it affects speed and memory, not the numbers",
    "kernels": "fused or compiled kernels of the same arithmetic; XLA compiles the whole step",
    "launch": "it affects how processes start and find each other; TPU hosts do this in their own way",
    "mesh": "recipec chooses the mesh for the accelerator; its fsdp axis splits weights and optimizer state",
    "padding": "padding is neither trained on nor attended to",
    "derived": "the tool finds this out about the model by itself",
    "checkpoints": "how checkpoints are kept, not what is trained",
    "evaluation": "how the tool evaluates, which does not affect training",
    "export": "what happens to the weights after training; merge.py follows the recipe's merge section",
    "generation": "a setting of generation, which does not affect training",
    "media": "the run has no pictures, video or sound",
    "method": "a setting of another stage or method",
}
"""Reasons why a key does not affect any number here. In a table's row, such a word stands for `exact` with
this sentence."""


MISSED = "recipec has no counterpart of it"


@dataclass(frozen=True)
class Row:
    """Keys that become the same thing.

    Attributes:
        verdict: the verdict on the keys, one of those that `Keys.follow` knows.
        keys: the keys, each with the values at which it does nothing.
        target: the recipe's path that the keys set, or the key that switches the settings on; "" for none.
        note: one sentence; the message of an error.
        help: the help of an error.
    """

    verdict: str
    keys: Mapping[str, tuple[Any, ...]]
    target: str = ""
    note: str = ""
    help: str = ""

    @property
    def passes_on(self) -> bool:
        """Whether the row says nothing of a key at some values, so that another row may follow."""
        return self.verdict == "count" or self.is_error

    @property
    def is_error(self) -> bool:
        """Whether the verdict is the code of an error."""
        return self.verdict[0] == "E" and self.verdict[1:].isdigit()


def table(text: str) -> tuple[Row, ...]:
    """Parse a table of keys, with rows `VERDICT KEY KEY=IDLE/IDLE -> TARGET: SENTENCE`.

    A row continues on indented lines. IDLE is a value at which the key does nothing, as JSON or a word.
    TARGET and SENTENCE may be missing. A word of REASONS is a verdict together with its sentence. All keys of
    `lost` and `learned` without a sentence have that of MISSED. The code of an error is a verdict, whose
    sentence is `MESSAGE => HELP`; `{key}` in it stands for the key.
    """
    rows = []
    for line in re.sub(r"\n +", " ", dedent(text).strip()).split("\n"):
        head, _, note = line.partition(": ")
        head, _, target = head.partition(" -> ")
        verdict, *keys = head.split()
        if verdict in REASONS:
            verdict, note = "exact", REASONS[verdict]
        elif verdict in ("lost", "learned"):
            note = note or MISSED
        named = (key.partition("=") for key in keys)
        values = {key: tuple(map(_idle, idle.split("/"))) if equals else () for key, equals, idle in named}
        note, _, help = note.partition(" => ")
        rows.append(Row(verdict, values, target, note, help))
    return tuple(rows)


def notes(text: str) -> dict[str, str]:
    """Return the sentences of a table's rows, by key."""
    return {key: row.note for row in table(text) for key in row.keys}


def _idle(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word


@dataclass
class Keys:
    """The keys of one section.

    Attributes:
        tool: the tool whose defaults are written out, "TRL".
        defaults: the keys' defaults; a key that is missing here has none.
        prefix: the section's path with a dot, "train."; "" for the file itself.
        stated: the keys that have a finding.
        sections: the Keys of nested sections that `below` has returned.
    """

    ledger: Ledger
    source: Source
    tool: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    stated: set[str] = field(default_factory=set)
    sections: dict[str, Keys] = field(default_factory=dict)

    def below(self, key: str, defaults: Mapping[str, Any] | None = None) -> Keys:
        """Return the keys of a section within this one."""
        if key not in self.sections:
            section = Keys(self.ledger, self.source, self.tool, defaults or {}, f"{self.prefix}{key}.")
            self.sections[key] = section
        return self.sections[key]

    def stands(self, key: str) -> bool:
        """Return whether the key is in the file, even with the value null."""
        return self.source.has(self.prefix + key)

    def given(self, key: str) -> bool:
        """Return whether the file gives the key a value."""
        return self.source.get(self.prefix + key) not in (MISSING, None)

    def value(self, key: str) -> Any:
        """Return the key's value, or else its default, or None if it has neither."""
        value = self.source.get(self.prefix + key)
        return self.defaults.get(key) if value is MISSING or value is None else value

    def number(self, key: str) -> float | None:
        """Return a number, which may be text (PyYAML reads 1e-4 as text).

        Any other value is an error, and the default is returned.
        """
        value = self.value(key)
        if value is None:
            return None
        number = as_number(value)
        if number is None:
            large = str(value).lstrip("+-").isdigit() or isinstance(value, float)
            return self._wrong(key, "a number below 1e30" if large else "a number")
        return number

    def integer(self, key: str) -> int | None:
        """Return a whole number, under the rules of `number`."""
        number = self.number(key)
        if number is None or int(number) == number:
            return None if number is None else int(number)
        return self._wrong(key, "a whole number")

    def flag(self, key: str) -> bool:
        """Return a switch. Any other value is an error, and the default, or else False, is returned."""
        value = self.value(key)
        if value is None or isinstance(value, bool):
            return bool(value)
        if str(value).lower() in (*TRUE, *FALSE):
            return str(value).lower() in TRUE
        return bool(self._wrong(key, "true or false"))

    def text(self, key: str) -> str | None:
        """Return a text. Any other value is an error, and the default is returned."""
        value = self.value(key)
        if value is None or isinstance(value, str):
            return value
        return self._wrong(key, "a text")

    def texts(self, key: str) -> list[str] | str | None:
        """Return a text or a list of texts. Any other value is an error, and the default is returned."""
        value = self.value(key)
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value
        return self._wrong(key, "a text, or a list of texts")

    def listed(self, key: str) -> list[str]:
        """Return a list of texts, as `texts` does. A single text counts as a list of one."""
        texts = self.texts(key) or []
        return [texts] if isinstance(texts, str) else texts

    def mapping(self, key: str) -> dict[str, Any]:
        """Return a mapping, {} for none."""
        value = self.value(key)
        if value is None or isinstance(value, dict):
            return value or {}
        return self._wrong(key, "a mapping") or {}

    def choice(self, key: str, choices: Iterable[str]) -> str | None:
        """Return one of the choices. Any other value is an error, and the default is returned."""
        value, known = self.value(key), list(choices)
        if value is None or value in known:
            return value
        return self._wrong(key, listing(known, "or"))

    def say(self, key: str, sets: Mapping[str, Any] | None = None, note: str = "") -> Statement:
        """State what a key becomes: exact, approximated if there is a note, its default if it is absent."""
        return Statement(self, Verb.GETS, key, sets or {}, note)

    def same(self, key: str, sets: Mapping[str, Any] | None = None, note: str = "") -> Statement:
        """State that a key of the file means the same here. The note is additional information."""
        return Statement(self, Verb.SAME, key, sets or {}, note)

    def default(self, key: str, value: Any, sets: Mapping[str, Any], note: str = "") -> Statement:
        """State a key whose default the tool computes. The default applies if the key has no value."""
        return Statement(self, Verb.DEFAULT, key, sets, note, value)

    def passive(self, keys: Iterable[str], note: str) -> Says:
        """State that keys do not affect the run's numbers here. The note says why."""
        for key in keys:
            yield self.same(key, note=note)

    def unused(self, keys: Iterable[str], note: str) -> Says:
        """State that the source's run does not read keys. The note says why."""
        for key in keys:
            yield Statement(self, Verb.UNUSED, key, note=note)

    def unless(self, key: str, idle: Iterable[Any], note: str) -> Statement:
        """State that a key has no counterpart, unless its value is in `idle`. The note says what changes."""
        return Statement(self, Verb.UNLESS, key, note=note, idle=tuple(idle))

    def learned(self, key: str, idle: Iterable[Any], note: str) -> Statement:
        """Refuse a key without a counterpart that changes what is learned, unless its value is in `idle`.

        Such keys change the loss, which parameters are trained, where they start, how they are updated, or
        what the model computes. Without the key the run would learn something else, so this is an error.
        """
        name = self.prefix + key
        help = (
            f"--set {name}=null ports the run without it; --partial writes the recipe, and its "
            "first line says that it is partial"
        )
        refusal = (E1180, f"`{name}` changes what is learned: {note}", help)
        return Statement(self, Verb.LEARNED, key, idle=tuple(idle), refusal=refusal)

    def anew(self, key: str, idle: Iterable[Any]) -> Statement:
        """Refuse a key that starts the run from new weights, unless its value is in `idle`."""
        refusal = pretraining(f"--set {self.prefix}{key}=null starts from the checkpoint's weights")
        return Statement(self, Verb.ANEW, key, idle=tuple(idle), refusal=refusal)

    def refuse(self, key: str, code: Code, message: str, help: str) -> Statement:
        """Refuse a key that the run cannot do without."""
        return Statement(self, Verb.REFUSED, key, refusal=(code, message, help))

    def differs(self, key: str, sets: Mapping[str, Any], note: str) -> Statement:
        """State that a key of the file is approximated, even if its value is null."""
        return Statement(self, Verb.DIFFERS, key, sets, note)

    def covered(self, key: str) -> Statement:
        """State that what is said of the section that a key is in covers the key."""
        return Statement(self, Verb.COVERED, key)

    def withdraw(self, key: str) -> Statement:
        """Take back what was said of a key, for another statement."""
        return Statement(self, Verb.WITHDRAWN, key)

    def defaulted(self, key: str, value: Any, sets: Mapping[str, Any], note: str) -> Statement:
        """State a default of the tool under a name that is no key of the section."""
        return Statement(self, Verb.DEFAULTED, key, sets, note, value)

    def sets(self, path: str, value: Any, comment: str = "") -> Statement:
        """Set a value of the recipe that several keys decide. Those keys have statements of their own."""
        return Statement(self, Verb.SETS, path, note=comment, value=value)

    def amend(self, path: str, verdict: Verdict, note: str) -> Statement:
        """Add a note to the keys that set a path of the recipe. The more severe verdict holds."""
        return Statement(self, Verb.AMENDS, path, note=note, value=verdict)

    def moves(self, path: str, to: str) -> Statement:
        """State that the keys which set a path of the recipe set another path instead."""
        return Statement(self, Verb.MOVES, path, value=to)

    def means(self, rows: int) -> Statement:
        """State how many rows a micro-batch's mean is over, if not the rows of one device."""
        return Statement(self, Verb.MEANS, value=rows)

    def warn(self, warning: Diagnostic) -> Statement:
        """Add a warning about what the recipe does with the file's values."""
        return Statement(self, Verb.WARNS, value=warning)

    def file(self, name: str, text: str) -> Statement:
        """Write a file next to the recipe, for data.transform."""
        return Statement(self, Verb.FILE, name, value=text)

    def mappings(self, names: Iterable[str]) -> Says:
        """State what empty sections are, and refuse those that are no mappings. Other keys are in them."""
        for name in names:
            section = self.source.get(self.prefix + name)
            if section is MISSING or name in self.stated or (isinstance(section, dict) and section):
                continue
            if not section and section is not False:
                yield self.same(name, note="empty: the same as without the key")
            else:
                yield self.refuse(
                    name, E1160, f"{name} is not a mapping of keys", f"write the keys of {name} below it"
                )

    def follow(self, rows: Iterable[Row], off: tuple[Any, ...] = ()) -> Says:
        """State what the rows of a table say of their keys, by verdict:

            exact       they mean the same, or affect no number
            unused      the source's run does not read them
            lost        they have no counterpart, which matters if they are on
            learned     as lost, but the run would learn something else: an error
            anew        if on, the run starts from new weights: an error
            E1145, ...  if on, the run cannot do without them: an error; nothing is said of them if off
            setting     of a feature that does not exist here; no effect without its switch, the target
            switch      if on, the target is true, or the value after its "="
            either      the target gets the first of the two values after its "=" if on, else the second
            integer, number, text, flag     the target gets their value; with a sentence, it is approximate
            positive    as number, and the target gets null for zero
            count       the target gets a whole number above zero of the file; nothing is said otherwise
            sets        no key: the target gets the value after its "=", with the sentence as its comment

        Args:
            off: values at which a key of `lost`, `learned` and `anew` does nothing, in addition to its row's.
        """
        for row in rows:
            target, equals, value = row.target.partition("=")
            if row.verdict == "sets":
                yield self.sets(target, _idle(value), row.note)
            for path, idle in row.keys.items():
                section, _, key = path.rpartition(".")
                keys = self.below(section) if section else self
                match row.verdict:
                    case "exact":
                        yield keys.same(key, note=row.note)
                    case "unused":
                        yield from keys.unused((key,), row.note)
                    case "lost":
                        yield keys.unless(key, (*off, *idle), row.note)
                    case "learned":
                        yield keys.learned(key, (*off, *idle), row.note)
                    case "anew":
                        yield keys.anew(key, (*off, *idle))
                    case "switch":
                        on = {target: value if equals else True}
                        yield keys.same(key, on if keys.flag(key) else None, row.note)
                    case "either":
                        yield keys.say(key, {target: value.split("/")[not keys.flag(key)]}, row.note)
                    case "positive":
                        yield keys.say(key, {target: keys.number(key) or None}, row.note)
                    case "count":
                        if keys.given(key) and (count := keys.integer(key)) and count > 0:
                            yield keys.same(key, {target: count}, row.note)
                    case code if row.is_error:
                        if keys.given(key) and keys.value(key) not in (*off, *idle):
                            message, help = (text.replace("{key}", key) for text in (row.note, row.help))
                            yield keys.refuse(key, getattr(refusals, code), message, help)
                    case "setting" if keys.given(row.target) and keys.value(row.target) not in off:
                        yield keys.unless(key, (), f"a setting of {row.target}, which recipec does not have")
                    case "setting":
                        yield keys.same(key, note=f"it has no effect without {row.target}")
                    case kind:
                        yield keys.say(key, {target: getattr(keys, kind)(key)}, row.note)

    def _wrong(self, key: str, what: str) -> Any:
        value = self.source.get(self.prefix + key)
        name = (self.prefix + key).rpartition(".")[2]
        default = self.defaults.get(key)
        way = f"{name}: {_plain(default)}" if default is not None else "correct the value, or remove the key"
        record(
            self.refuse(
                key, E1160, f"`{self.prefix}{key}` must be {what} in {self.tool}, not {shown(value)}", way
            )
        )
        return default


E1152 = Code(
    "E1152",
    "pre-training",
    cause="The ported file starts from new weights. A recipe fine-tunes the weights of a checkpoint.",
    cure="Start from a checkpoint, as the help says.",
)


def pretraining(help: str) -> tuple[Code, str, str]:
    """Return the code, message and help for a run that starts from new weights."""
    return E1152, "the run starts from new weights; recipec fine-tunes the weights of a checkpoint", help


def words(text: str) -> frozenset[str]:
    """Split a text into words, for a set of keys."""
    return frozenset(text.split())


def keeps(key: str, value: Any) -> str:
    """Return the help for data sets that do not go together: what keeps those of the first one's form."""
    return f"--set {shlex.quote(f'{key}={flow(value)}')} keeps the data sets of the first one's form"


def as_number(value: Any) -> float | None:
    """Return a number below MOST, which may be given as text, or None for anything else."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < MOST else None


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@functools.cache
def tools() -> Mapping[str, Any]:
    """Return all of data/dialects.json."""
    data: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return data


def keys_of(tool: str, *sections: str) -> dict[str, list[Any]]:
    """Return the keys of some sections: [type] if the key is required, else [type, default]."""
    data = tools()[tool]["sections"]
    return {key: entry for section in sections for key, entry in data[section].items()}


def defaults_of(tool: str, *sections: str) -> dict[str, Any]:
    """Return the defaults of some sections' keys, without those that the tool computes."""
    return {
        key: entry[1]
        for key, entry in keys_of(tool, *sections).items()
        if len(entry) > 1 and not (isinstance(entry[1], dict) and "is" in entry[1])
    }
