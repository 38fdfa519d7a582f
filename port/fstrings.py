"""Parse the f-strings of Python 3.12 with the parser of Python 3.11.

Since 3.12 a field of an f-string may contain the f-string's own quotes, and backslashes. Such a field is
replaced by a name of the same length, and the name by the field's syntax after parsing. So all places are
right.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

_START = re.compile(r"(?<![\w])([rRbBuUfF]{0,2})('''|\"\"\"|'|\")")
_OPENING, _CLOSING = "([{", ")]}"


@dataclass
class _Scanner:
    """Find the fields of f-strings that Python 3.11 does not parse.

    Attributes:
        fields: the start and end of each field's expression.
    """

    text: str
    fields: list[tuple[int, int]] = field(default_factory=list)

    def code(self, at: int, *, inner: bool = False) -> int:
        """Scan code, to the end of the text or of a field, and return where it ends."""
        text, depth = self.text, 0
        while at < len(text):
            char = text[at]
            start = _START.match(text, at)
            if start:
                at = self.string(start)
            elif char == "#" and not inner:
                end = text.find("\n", at)
                at = end if end >= 0 else len(text)
            elif inner and not depth and (char in "}:" or (char == "!" and text[at + 1 : at + 2] != "=")):
                return at
            else:
                depth += (char in _OPENING) - (char in _CLOSING)
                at += 1
        return at

    def string(self, start: re.Match[str]) -> int:
        """Scan a string, and return where it ends."""
        text, at = self.text, start.end()
        prefix, quote = start[1].lower(), start[2]
        while at < len(text):
            if text.startswith(quote, at):
                return at + len(quote)
            if text[at] == "\n" and len(quote) == 1:
                return at
            if text[at] == "\\" or ("f" in prefix and text.startswith(("{{", "}}"), at)):
                at += 2
            elif "f" in prefix and text[at] == "{":
                at = self.replaced(at + 1, quote)
            else:
                at += 1
        return at

    def replaced(self, at: int, quote: str) -> int:
        """Scan a field's expression, and note it if it has the f-string's quote or a backslash."""
        before = len(self.fields)
        end = self.code(at, inner=True)
        written = self.text[at:end]
        if (quote in written or "\\" in written) and "\n" not in written:
            del self.fields[before:]  # they are within it
            self.fields.append((at, end))
        return end


def parsed(text: str, file: str, flags: int) -> ast.Module | None:
    """Parse a script with f-strings of Python 3.12. Return None if it has none.

    Raises:
        SyntaxError: it is not valid in Python 3.12 either, or a field is too short to be replaced.
    """
    scanner = _Scanner(text)
    scanner.code(0)
    names: dict[str, tuple[str, int, int]] = {}
    pieces, last = [], 0
    for start, end in scanner.fields:
        written = text[start:end]
        name = f"_{len(names):x}".ljust(len(written), "_")
        if len(name) == len(written) and name not in text:
            line = text.count("\n", 0, start)
            column = len(text[text.rfind("\n", 0, start) + 1 : start].encode())
            names[name] = (written, line, column)
            pieces += [text[last:start], name]
            last = end
    if not names:
        return None
    module: ast.Module = compile("".join([*pieces, text[last:]]), file, "exec", flags)
    return _Fields(names, file).visit(module)


class _Fields(ast.NodeTransformer):
    """Put the syntax of fields in the place of their names."""

    def __init__(self, names: dict[str, tuple[str, int, int]], file: str) -> None:
        self.names, self.file = names, file

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self.names:
            return node
        written, line, column = self.names[node.id]
        inside = f"({written})\n"  # white space may begin it
        try:
            module = parsed(inside, self.file, ast.PyCF_ONLY_AST) or ast.parse(inside, self.file)
        except SyntaxError as error:
            raise SyntaxError(error.msg, (self.file, line + 1, column + 1, None)) from None
        statement = module.body[0]
        if not isinstance(statement, ast.Expr) or len(module.body) > 1:
            raise SyntaxError("not an expression", (self.file, line + 1, column + 1, None))
        for child in ast.walk(statement.value):
            if isinstance(child, ast.expr | ast.keyword | ast.arg):
                child.lineno = child.end_lineno = line + 1
                child.col_offset += column - 1
                child.end_col_offset = (child.end_col_offset or 0) + column - 1
        return statement.value
