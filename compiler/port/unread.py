"""Keys that a tool does not know: it would refuse them, or pass them over in silence; neither does a port."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from compiler.port import known
from compiler.port.dialects import Module
from compiler.port.ledger import Ledger
from compiler.port.recognise import ROLES
from compiler.port.source import Source
from spec.diagnostics import Diagnostic, has_errors

PACKAGES = {"adapter_config": "peft", "accelerate": "accelerate", "dataset_info": "llamafactory"}
"""Whose keys a file of a role has, as `known` has them."""


LEAST = 5
"""Letters that make a common beginning."""

PACKAGES = {"adapter_config": "peft", "accelerate": "accelerate", "dataset_info": "llamafactory"}
"""Whose keys a file of a role has, as `known` has them."""

TOP = {"axolotl": "config", "litgpt": "lora full"}
"""Sections with the keys of a config itself, where others are of what lies within it."""


def report(ledger: Ledger, dialect: Module) -> Iterator[Diagnostic]:
    """Records every key that nothing was said of as unsupported, and warns of each."""
    roles = {source.file: role for role, source in ledger.sources.others.items()}
    failed = has_errors(ledger.diagnostics)
    for source in ledger.sources.all():
        role = roles.get(source.file)
        title = ROLES[role].title if role else dialect.TITLE
        for key in ledger.unread(source):
            marks = ROLES[role].marks if role else dialect.MARKS
            names = _names(PACKAGES.get(role, "") if role else dialect.NAME, key) | set(marks)
            leaf = key.rpartition(".")[2].partition("[")[0]
            if leaf not in names:
                yield _unknown(ledger, source, key, title, nearest(leaf, sorted(names)))
            elif failed:
                ledger.unsupported(source, key, "not looked at, for the errors in other keys")
            else:
                ledger.unsupported(source, key, "nothing is made of this value")
                message = f"nothing is made of the value of `{key}`"
                yield Diagnostic(
                    "W1114", message, key, f"correct it: it is a key of {title}", source.span(key)
                )


def _unknown(ledger: Ledger, source: Source, key: str, title: str, close: str | None) -> Diagnostic:
    ledger.unsupported(source, key, f"no key of {title}{f': nearly `{close}`' if close else ''}")
    help = f"did you mean `{close}`?" if close else "remove it, or say whose file it is by --from"
    place = source.keys.get(key) or source.span(key)
    return Diagnostic("W1114", f"`{key}` is no key of {title}", key, help, place)


def nearest(key: str, names: Sequence[str]) -> str | None:
    """The name that a key was likely meant for: one begins with the other, or they are alike."""
    begins = [name for name in names if key.startswith(name) or name.startswith(key)]
    begins = [name for name in begins if min(len(key), len(name)) >= LEAST]
    if begins:
        return min(begins, key=lambda name: abs(len(name) - len(key)))
    close = get_close_matches(key, names, n=1, cutoff=0.8)
    return close[0] if close else None


def _names(tool: str, key: str) -> set[str]:
    """The keys that the tool's own code knows where a key stands, without the sections that they lie in."""
    sections = known.tools().get(tool, {}).get("sections", {})
    own = TOP.get(tool, "").split() if "." not in key else []
    chosen = [sections[name] for name in own] or list(sections.values())
    return {name.rpartition(".")[2] for section in chosen for name in section}
