"""Copy functions of a script with the statements at its top that they need, so that they run without it."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipec.port.meaning.conversion import FUNCTION
from recipec.port.meaning.scripts import Copy, module_of
from recipec.port.read import ScriptText, Tree, conceal
from recipec.port.script_values import Function, Made
from recipec.spec.load import display, read_text


@dataclass
class Copier:
    """Copies functions of a script.

    Attributes:
        code: the script's text.
        module: the script.
        names: the values of the script's variables, as far as they were followed.
        bound: by name, the positions of the statements at the top of the script that bind it.
    """

    code: ScriptText
    module: ast.Module
    names: ChainMap[str, Any]
    bound: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, node in enumerate(self.module.body):
            for name in _binds(node):
                self.bound.setdefault(name, []).append(number)

    def copy(self, function: Function, name: str) -> tuple[Copy | None, str]:
        """Return a function with what it needs, or None and the reason.

        Args:
            name: the name for a function without one.
        """
        node = function.node
        if isinstance(node, ast.ClassDef):
            return None, "it is an object of a class of the script"
        top = node in self.module.body
        local = {} if top else function.around.maps[0]
        needed: dict[int, str] = {}
        pending = list(_globals(node))
        while pending:
            wanted = pending.pop()
            if wanted in local and local is not self.names.maps[-1]:
                return None, f"it uses `{wanted}` of the function around it"
            if wanted not in self.bound:
                if hasattr(builtins, wanted):
                    continue
                return None, f"it uses `{wanted}`, which the top of the script does not define"
            value = self.names.get(wanted)
            if isinstance(value, Made) and value.kind != "object":
                return None, f"it uses `{wanted}`, which the script loads or constructs"
            for number in self.bound[wanted]:
                if number not in needed:
                    statement = self.module.body[number]
                    needed[number] = self.text(statement, wanted)
                    pending += _globals(statement) if not _imports(statement) else ()
                elif _imports(self.module.body[number]) and wanted not in needed[number]:
                    needed[number] += f"\n{self.text(self.module.body[number], wanted)}"
        lines = {self.module.body[number].lineno: text for number, text in needed.items()}
        if isinstance(node, ast.Lambda):
            arguments = ast.unparse(node.args)
            lines[node.lineno] = f"def {name}({arguments}):\n    return {self.written(node.body)}"
        elif not top:
            lines[node.lineno] = ast.unparse(node)
        else:
            lines[node.lineno] = self.text(node, node.name)
        return Copy(getattr(node, "name", name), tuple(sorted(lines.items()))), ""

    def origin(self, name: str) -> str:
        """Return the module that the top of the script imports a name from, "" if it does not."""
        nodes = (self.module.body[number] for number in self.bound.get(name, ()))
        return next((node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)), "")

    def text(self, node: ast.stmt, name: str) -> str:
        """Return a statement as it is in the script; of an import, only the part for a name."""
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias for alias in node.names if _of_import(alias) == name]
            if isinstance(node, ast.Import):
                return ast.unparse(ast.Import(names))
            return ast.unparse(ast.ImportFrom(node.module, names, node.level))
        decorators = getattr(node, "decorator_list", ())
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        text = self.whole(first, node.end_lineno or first)
        try:
            same = ast.dump(ast.Module([node], [])) == ast.dump(ast.parse(text))
        except SyntaxError:
            same = False
        return text if same else ast.unparse(node)

    def whole(self, first: int, last: int) -> str:
        """Return lines of the script. What looks like a token is hidden."""
        return "\n".join(conceal(line.rstrip()) for line in self.code.lines[first - 1 : last])

    def written(self, node: ast.expr) -> str:
        """Return an expression as it is in the script, with its later lines indented for a function."""
        first, *rest = self.code.lines[node.lineno - 1 : node.end_lineno]
        start = len(first.encode()[: node.col_offset].decode(errors="ignore"))
        lines = [first[start:], *rest]
        last = (rest or [first])[-1].encode()[: node.end_col_offset].decode(errors="ignore")
        lines[-1] = last[start:] if not rest else last
        outer = min((len(line) - len(line.lstrip()) for line in rest if line.strip()), default=0) - 4
        text = "\n".join([conceal(lines[0]), *(conceal(_moved(line, outer)) for line in lines[1:])])
        try:
            same = ast.dump(ast.parse(f"({text})", mode="eval").body) == ast.dump(node)
        except SyntaxError:
            same = False
        return text if same else ast.unparse(node)


def _moved(line: str, columns: int) -> str:
    """Return a line with its indentation reduced by some columns."""
    return line[min(columns, len(line) - len(line.lstrip())) :] if columns > 0 else " " * -columns + line


def of_file(path: Path) -> Copier | None:
    """Return a copier for a file of functions, None if it is not valid Python."""
    text, problem = read_text(path, "a module", 1 << 20, "a Python file", marked=True)
    if problem is not None:
        return None
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    code = ScriptText(Tree(text, display(path)))
    for number, line in enumerate(text.split("\n")):
        code.add(line, number, list(range(len(line))))
    return Copier(code, module, ChainMap({}))


def of_maker(copier: Copier, name: str, title: str) -> tuple[str, str]:
    """Return the text of a module that converts rows by the function that another function returns.

    Axolotl calls the function with its configuration, and what it returns with a row, and maybe a tokenizer.

    Returns:
        The text, "" with the reason if there is none.
    """
    maker = next((node for node in copier.module.body if _named(node) == name), None)
    if not isinstance(maker, ast.FunctionDef):
        return "", f"its file has no function {name}"
    inner = {node.name: node for node in maker.body if isinstance(node, ast.FunctionDef)}
    returned = next((node.value for node in maker.body if isinstance(node, ast.Return)), None)
    pair = isinstance(returned, ast.Tuple) and bool(returned.elts)
    first = returned.elts[0] if isinstance(returned, ast.Tuple) and pair else returned
    change = inner.get(first.id) if isinstance(first, ast.Name) else None
    if change is None:
        return "", f"{name} returns no function that it defines"
    unknown = [argument.arg for argument in (*maker.args.args, *change.args.args[1:])]
    used = {node.id for node in ast.walk(maker) if isinstance(node, ast.Name)}
    if taken := sorted(used.intersection(unknown)):
        return "", f"it reads `{taken[0]}`, which only Axolotl has"
    copy, why = copier.copy(Function(maker, copier.names), name)
    if copy is None:
        return "", why
    named = module_of(f"Rows as Axolotl's `{title}` makes them.", [copy])
    arguments = ", ".join("None" for _ in maker.args.args[: len(maker.args.args) - len(maker.args.defaults)])
    call = f"{name}({arguments}){'[0]' if pair else ''}"
    return (
        f"""{named}

CHANGE = {call}


def {FUNCTION}(row):
    \"\"\"Return a row with the columns that the function makes.\"\"\"
    return {{**row, **CHANGE(row)}}
""",
        "",
    )


def _named(node: ast.stmt) -> str:
    return getattr(node, "name", "")


def _binds(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement at the top of a script binds."""
    match node:
        case ast.Import(names) | ast.ImportFrom(_, names):
            yield from map(_of_import, names)
        case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
            yield name
        case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
            stores = (name for name in ast.walk(node) if isinstance(name, ast.Name))
            yield from (name.id for name in stores if isinstance(name.ctx, ast.Store))
        case ast.Try(body, handlers):
            inner = [*body, *(statement for handler in handlers for statement in handler.body)]
            if all(
                isinstance(statement, ast.Import | ast.ImportFrom | ast.Assign | ast.Pass)
                for statement in inner
            ):
                for statement in inner:
                    yield from _binds(statement)


def _imports(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _of_import(name: ast.alias) -> str:
    return name.asname or name.name.partition(".")[0]


def _globals(node: ast.AST) -> set[str]:
    """Return the names that a function or a statement takes from the module around it."""
    text = ast.unparse(node)
    names = {node.name} if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else set()

    def inner(table: symtable.SymbolTable) -> Iterator[str]:
        for symbol in table.get_symbols():
            if symbol.is_global() or (table.get_type() == "module" and symbol.is_referenced()):
                yield symbol.get_name()
        for child in table.get_children():
            yield from inner(child)

    return set(inner(symtable.symtable(text, "script", "exec"))) - names
