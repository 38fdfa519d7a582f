"""Tests that runtime/clients runs on a bare TPU VM: with Python 3.10, and without packages."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interpreters import interpreter

ROOT = Path(__file__).resolve().parents[2]
SERVING = ROOT / "runtime" / "clients"

LATER = {
    "tomllib": {"*"},
    "datetime": {"UTC"},
    "enum": {"StrEnum", "verify", "member", "nonmember", "global_enum", "ReprEnum", "EnumCheck"},
    "typing": {
        *("Self", "LiteralString", "Never", "Required", "NotRequired", "TypeVarTuple", "Unpack"),
        *("assert_never", "assert_type", "reveal_type", "override", "dataclass_transform", "TypeAliasType"),
    },
    "asyncio": {"TaskGroup", "Runner", "timeout", "Barrier"},
    "contextlib": {"chdir"},
    "itertools": {"batched"},
    "hashlib": {"file_digest"},
    "http": {"HTTPMethod"},
    "logging": {"getLevelNamesMapping"},
    "math": {"cbrt", "exp2", "sumprod"},
    "operator": {"call"},
}
"""Additions to the standard library since 3.11, by module; "*" for new modules."""

BUILTINS = {"ExceptionGroup", "BaseExceptionGroup", "PythonFinalizationError"}


def modules() -> dict[str, ast.Module]:
    """Return the modules of runtime/clients and their imports in runtime/, by path."""
    found: dict[str, ast.Module] = {}
    waiting = [*SERVING.glob("*.py"), ROOT / "runtime" / "__init__.py"]
    while waiting:
        path = waiting.pop()
        name = str(path.relative_to(ROOT))
        if name in found:
            continue
        found[name] = ast.parse(path.read_text("utf-8"), name, feature_version=(3, 10))
        for imported in imports(name, found[name]):
            if imported.split(".")[0] == "runtime":
                target = ROOT / (imported.replace(".", "/") + ".py")
                waiting.append(target if target.is_file() else target.with_suffix("") / "__init__.py")
    return found


def imports(name: str, tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = Path(name).parts[: -node.level] if node.level else ()
            module = ".".join([*above, *filter(None, [node.module])])
            yield module
            for alias in node.names:
                if (ROOT / module.replace(".", "/") / f"{alias.name}.py").is_file():
                    yield f"{module}.{alias.name}"


def test_serving_modules_use_only_python_3_10_syntax() -> None:
    """Let ruff look for later syntax, such as `except*`."""
    assert {"runtime/clients/client.py", "runtime/clients/smoke.py", "runtime/errors.py"} <= modules().keys()
    ruff = [
        Path(sys.executable).with_name("ruff"),
        "check",
        "--isolated",
        "--select=E9",
        "--target-version=py310",
    ]
    done = subprocess.run([*ruff, *modules()], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def test_serving_modules_import_only_the_standard_library() -> None:
    for name, tree in modules().items():
        for imported in imports(name, tree):
            top = imported.split(".")[0]
            assert top == "runtime" or top in sys.stdlib_module_names, f"{name} imports {imported}"
            assert "*" not in LATER.get(top, ()), f"{name} imports {imported}, which 3.10 has not"


def test_serving_modules_use_no_names_added_after_python_3_10() -> None:
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                used = {(node.module or "", alias.name) for alias in node.names}
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used = {(node.value.id, node.attr)}
            elif isinstance(node, ast.Name):
                assert node.id not in BUILTINS, f"{name}:{node.lineno}: {node.id}"
                continue
            else:
                continue
            for module, attribute in used:
                assert attribute not in LATER.get(module, ()), f"{name}: {module}.{attribute}"


def test_python_3_10_imports_every_serving_module() -> None:
    """Import with a real Python 3.10, in addition to the checks above."""
    try:
        python = interpreter("3.10")
    except RuntimeError as missing:
        pytest.skip(f"{missing}; 3.10 is held by the syntax tree alone")
    names = [f"runtime.clients.{path.stem}" for path in SERVING.glob("*.py") if path.stem != "__init__"]
    program = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    # -I ignores the user's packages, and -S the site's. -B writes nothing next to the sources.
    command = [python, "-ISBc", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{program}", *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
