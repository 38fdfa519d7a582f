"""Translate results of checking into the protocol's types."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lsprotocol import types
from pygls.workspace import PositionCodec

from recipec.compiler.lsp.process import Checked, Fix, Position
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic, Span

SEVERITIES = {
    "error": types.DiagnosticSeverity.Error,
    "warning": types.DiagnosticSeverity.Warning,
    "note": types.DiagnosticSeverity.Hint,
}


@dataclass(frozen=True)
class View:
    """A document as the editor sees it.

    Attributes:
        path: absolute.
        lines: split as YAML and the protocol do.
        codec: converts positions to the editor's units of characters.
        related: whether the editor shows related positions with a diagnostic.
        docs: address of the page that describes the codes; None for no link.
    """

    path: str
    lines: Sequence[str]
    codec: PositionCodec
    related: bool
    docs: str | None

    def place(self, position: types.Position) -> Position:
        """Convert the editor's position to our own."""
        client = self.codec.position_from_client_units(self.lines, position)
        return client.line, client.character

    def range(self, span: Span) -> types.Range:
        """Return the range of a span in any document: at least one character, if the line has one."""
        line, text = span.line - 1, span.text
        if os.path.abspath(span.file) == self.path:
            text = self.lines[line] if line < len(self.lines) else ""  # a span's text hides secrets
        end = min(span.column - 1 + max(1, span.length), len(text))
        start = max(0, min(span.column - 1, end - 1))
        first, last = (self.codec.client_num_units(text[:column]) for column in (start, end))
        return types.Range(types.Position(line, first), types.Position(line, last))

    def diagnostics(self, checked: Checked) -> list[types.Diagnostic]:
        return [self._diagnostic(diagnostic, checked.extends) for diagnostic, _ in checked.diagnostics]

    def _diagnostic(self, diagnostic: Diagnostic, extends: Span | None) -> types.Diagnostic:
        message = (
            diagnostic.message
            if diagnostic.help is None
            else f"{diagnostic.message}\nhelp: {diagnostic.help}"
        )
        first_line = Span(self.path, 1, 1, "", len(self.lines[0]))
        place, related = diagnostic.span or first_line, None
        if os.path.abspath(place.file) != self.path:
            # It is in a file that this one extends, so the message says where.
            message = f"in {Path(place.file).name}, line {place.line}: {message}"
            if self.related:
                there = types.Location(Path(os.path.abspath(place.file)).as_uri(), self.range(place))
                related = [types.DiagnosticRelatedInformation(there, diagnostic.message)]
            place = extends or first_line
        page = types.CodeDescription(f"{self.docs}#{diagnostic.code.anchor}") if self.docs else None
        return types.Diagnostic(
            range=self.range(place),
            message=message,
            severity=SEVERITIES[diagnostic.severity],
            code=diagnostic.code,
            code_description=page,
            source="recipe",
            related_information=related,
        )

    def action(self, fix: Fix, uri: str, diagnostic: types.Diagnostic) -> types.CodeAction:
        """Return the editor's action for the repair of a diagnostic."""
        replaced = types.Range(types.Position(*fix.start), types.Position(*fix.end))
        edit = types.TextEdit(self.codec.range_to_client_units(self.lines, replaced), fix.text)
        return types.CodeAction(
            title=fix.title,
            kind=types.CodeActionKind.QuickFix,
            diagnostics=[diagnostic],
            is_preferred=True,
            edit=types.WorkspaceEdit(changes={uri: [edit]}),
        )


def described(code: Code) -> str:
    """Describe a code, as Markdown."""
    return f"**{code}: {code.heading}**\n\n{code.cause}\n\n{code.cure}"
