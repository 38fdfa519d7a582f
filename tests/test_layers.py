"""Tests of which room may import which, from the modules' syntax trees, without importing anything.

docs/architecture.md describes the rooms. An import counts "at once" if it runs when a module is imported,
"later" if it runs within a function, and "for types" under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from jinja2 import Environment
from jinja2 import nodes as parts

from scripts import architecture
from tests import mutants

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("spec", "compiler", "port", "runtime", "templates")
NAME = "recipec."
"""The prefix under which other folders import the packages."""
FOLDERS = (*PACKAGES, "scripts", "tests")

BASE = {"pydantic", "pydantic_core", "jinja2", "markupsafe", "ruamel", "typer", "rich", "yaml"}
"""The packages of a distribution without extras, by their import names."""

ELSEWHERE = {
    "compiler.lsp": "what an editor speaks with, of the extra lsp",
    "compiler.parity": "compares arrays of runs, which trained here",
    "compiler.plan.abstract": "the step of shapes and libtpu's devices, in a worker's process",
}
"""Parts of the compiler that need more than BASE, and why; no other module imports them at once."""

ROOMS = (
    *("recipec", "spec", "runtime", "templates"),
    # What every command may use: errors, words, texts in files and on a terminal.
    *("compiler", "compiler.errors", "compiler.json_value", "compiler.python_text", "compiler.render"),
    *("compiler.store", "compiler.wording", "compiler.writing", "compiler.terminal", "compiler.packages"),
    "compiler.pages",
    # What a recipe means.
    *("compiler.catalog", "compiler.lowering", "compiler.miniature", "compiler.vllm", "compiler.roofline"),
    *("compiler.checks", "compiler.lower", "compiler.arrangements"),
    # What follows from it.
    *("compiler.artifacts", "compiler.plan", "compiler.card", "compiler.emitters", "compiler.pack"),
    *("compiler.hub", "compiler.trained", "compiler.deployment"),
    *("compiler.explain", "compiler.report", "compiler.watch", "compiler.rehearse", "compiler.parity"),
    *("compiler.lsp", "compiler.new", "compiler.cli"),
    "port",
)
"""All rooms from the ground up. A room is a module, or a package without the rooms in it.
A module imports only its own room and rooms before it, also within functions and for types."""

DOORS = {
    "compiler.catalog": {"compiler.catalog", "compiler.catalog.added"},
    "compiler.checks": {
        *("compiler.checks", "compiler.checks.backends"),
        # For the codes that they declare, by which another room finds a diagnostic.
        *("compiler.checks.launch", "compiler.checks.lora", "compiler.checks.server_cache"),
        *("compiler.checks.server", "compiler.checks.train"),
    },
    "compiler.cli": {"compiler.cli.main"},
    "compiler.emitters": {
        *("compiler.emitters.emit", "compiler.emitters.notebook"),
    },
    "compiler.lsp": {"compiler.lsp.frames", "compiler.lsp.language_server"},
    "compiler.watch": {"compiler.watch.watch"},
    "runtime.checkpoints": {"runtime.checkpoints.manifest", "runtime.checkpoints.record"},
    "runtime.hosts": set(),
    "runtime.merging": {"runtime.merging.journal", "runtime.merging.tokenizer_files"},
    "runtime.metrics": {"runtime.metrics.loggers", "runtime.metrics.run_state"},
    "runtime.peft": {"runtime.peft.adapter", "runtime.peft.fitting", "runtime.peft.peft_names"},
    "runtime.training": {
        *("runtime.training.objective_losses", "runtime.training.objectives", "runtime.training.optimizers"),
        *("runtime.training.rollout_layout", "runtime.training.rollouts"),
        *("runtime.training.step", "runtime.training.trace"),
    },
    "runtime.weights": {
        *("runtime.weights.added_rows", "runtime.weights.agreement", "runtime.weights.checkpoint"),
        *("runtime.weights.quantized_formats", "runtime.weights.headers"),
    },
}
"""Rooms with doors: the modules of each that the compiler imports from outside of it."""

READ_BY_PORT = {
    # Codes of checks, by which it finds a diagnostic.
    *("compiler.checks.launch", "compiler.checks.train", "compiler.lowering.facts"),
    # Models, machines, and the checks of the recipe that it writes.
    *("compiler.arrangements", "compiler.catalog", "compiler.lowering.format_keys"),
    *("compiler.lowering.hardware", "compiler.lower", "compiler.roofline.step_estimate"),
    *("compiler.lowering.program", "compiler.lowering.references", "compiler.lowering.run_length"),
    *("runtime.model.adapters", "runtime.model.families", "runtime.model.families.decoder_family"),
    *("runtime.model.families.family", "runtime.model.families.towers"),
    *("runtime.data.messages", "runtime.data.tokenizer", "runtime.peft.adapter"),
    *("runtime.training.objectives", "runtime.reinforcement.loss_types"),
    # Texts of recipes, modules and pages.
    *("compiler.python_text", "compiler.wording", "compiler.pages.document", "compiler.pages.html"),
    *("compiler.pages.markdown", "compiler.pages.text"),
    # What the command does next to the port itself: files, models of the hub, plans.
    *("compiler.artifacts.artifact", "compiler.writing", "compiler.terminal", "compiler.cli.commands"),
    *("compiler.cli.guard", "compiler.cli.planning", "compiler.cli.printing", "compiler.cli.reading"),
    *("compiler.hub.fetch", "compiler.plan.results", "compiler.plan.search"),
}
"""The modules outside of spec/ that port/ imports. No package imports port/."""

TESTING = {"tests", "unittest", "pytest"}
"""What no package of the product imports; unittest also for its `mock`."""

PRIVATE = re.compile(r"\bimport\b(?:[^\n(]*|\s*\([^)]*)\b_[^_]")
"""A statement that may import a private name."""

HEAVY = {
    *("jax", "flax", "optax", "orbax", "tunix", "qwix", "grain", "etils", "array_record", "ml_dtypes"),
    *("numpy", "pyarrow", "datasets", "transformers", "tokenizers", "huggingface_hub", "safetensors"),
    *("torch", "peft", "trl", "accelerate", "fsspec", "tensorboardX", "wandb", "mlflow", "tqdm"),
    *("jsonschema", "referencing", "PIL"),
}
"""Third-party packages that functions import, because a process may not need them."""

SLOW = {
    *("docker", "httpx", "jinja2", "plotext", "plotly", "pygls", "readline", "requests", "rich"),
    *("tpu_inference", "vllm"),
}
"""More packages that functions of compiler/ import, because a command may not need or not have them."""

LATER = {
    "compiler.cli.check": {"compiler.cli.planned"},
    "compiler.cli.commands": {"importlib"},
}
"""Modules that functions import for their time: plans, which few checks read; the metadata of packages."""

STARTING = {
    *("compiler.cli.commands", "compiler.cli.guard", "compiler.cli.parser"),
    *("compiler", "compiler.errors", "compiler.lowering", "compiler.lowering.backend", "compiler.terminal"),
    *("port", "port.options", "port.tools"),
    *("recipec", "runtime", "runtime.errors", "runtime.progress", "spec", "spec.codes", "spec.diagnostics"),
}
"""Modules that every command may import before its work, besides those of the arguments."""

NAMED_BY_SUBJECT = {
    *("spec/language", "compiler/checks", "compiler/emitters", "compiler/explain"),
    *("compiler/cli", "compiler/cli/arguments", "port/meaning", "port/dialects"),
}
"""Folders with a module for each section, command or tool, whose name other modules may have too."""

MOST_PARAMETERS = 7
"""For functions and methods."""

SCRIPTS = {
    "runtime.backends.torchax.torchax_run.run",
    "runtime.backends.trl.trl_run.run",
    "runtime.merging.merge.main",
    "runtime.training.train.run",
}
"""Functions that the generated scripts call, with a constant of the script for each parameter."""

DECLARATION = "spec.language.section.field"
"""What declares a key, with a parameter for each thing that the schema says of it."""


@dataclass(frozen=True)
class Import:
    """One name that a module imports.

    Attributes:
        module: a module of this repository, or the first part of another package's name.
        name: the imported name; None for the module itself.
        line: its line.
        later: whether it is only imported when a function runs.
        typed: whether only type checkers see it.
    """

    module: str
    name: str | None
    line: int
    later: bool
    typed: bool = False


pytestmark = pytest.mark.usefixtures("without_collections")


def listed() -> dict[str, Path]:
    """Return every module of the repository, by its name."""
    found = {"recipec": ROOT / "recipec" / "__init__.py"}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            file = path.relative_to(ROOT)
            if file.parts[:2] != ("tests", "golden"):
                found[".".join(file.with_suffix("").parts).removesuffix(".__init__")] = path
    return found


MODULES = listed()


def tree(module: str) -> ast.Module:
    return architecture.tree(MODULES[module])


@functools.cache
def nodes(module: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(module)))


@functools.cache
def mentioned(module: str) -> tuple[Import, ...]:
    """Return the imports of a module, those for types included."""
    return tuple(_imports(tree(module), module, later=False))


@functools.cache
def imports(module: str) -> tuple[Import, ...]:
    """Return the imports of a module that run."""
    return tuple(entry for entry in mentioned(module) if not entry.typed)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements right within a node, among which imports are; expressions have none."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        yield from getattr(node, field, ())


def _imports(node: ast.AST, importer: str, later: bool) -> Iterator[Import]:
    for child in _statements(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            body = ast.Module(child.body, [])
            yield from (replace(entry, typed=True) for entry in _imports(body, importer, later))
            for other in child.orelse:
                yield from _imports(other, importer, later)
        elif isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(known(alias.name), None, child.lineno, later)
        elif isinstance(child, ast.ImportFrom):
            module = source(child, importer)
            for alias in child.names:
                whole = f"{module}.{alias.name}".removeprefix(NAME)
                if whole in MODULES:
                    yield Import(whole, None, child.lineno, later)
                else:
                    yield Import(known(module), alias.name, child.lineno, later)
        else:
            inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _imports(child, importer, later or inner)


def source(node: ast.ImportFrom, importer: str) -> str:
    """Return the module that names are imported from.

    It is a full name, except in runtime/, which runs from anywhere.
    """
    if node.level == 0:
        assert node.module is not None
        return node.module
    parts = importer.split(".")
    assert parts[0] == "runtime", f"{importer}:{node.lineno}: imports name their source in full"
    package = parts if MODULES[importer].name == "__init__.py" else parts[:-1]
    return ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])


def known(name: str) -> str:
    name = name.removeprefix(NAME)
    return name if name in MODULES else name.partition(".")[0]


def inside(module: str, room: str) -> bool:
    """Return whether a module is in a room, which is a package or a module."""
    return module == room or module.startswith(f"{room}.")


def those(*rooms: str) -> list[str]:
    return [module for module in MODULES if any(inside(module, room) for room in rooms)]


def said(importer: str, one: Import) -> str:
    what = one.module if one.name is None else f"{one.module}.{one.name}"
    return f"{MODULES[importer].relative_to(ROOT)}:{one.line} imports {what}"


@pytest.mark.parametrize(
    ("room", "strangers"),
    [
        ("runtime", {"spec", "compiler", "port", "templates", "scripts", *TESTING}),
        ("spec", {"compiler", "port", "runtime", "templates", "scripts", *TESTING}),
        ("templates", {"spec", "compiler", "port", "runtime", "scripts", *TESTING}),
        ("compiler", {"port", "scripts", *TESTING}),
        ("port", {"scripts", "templates", *TESTING}),
        ("scripts", {"port", "tests"}),
    ],
)
def test_packages_do_not_import_forbidden_packages(room: str, strangers: set[str]) -> None:
    wrong = [
        said(module, one)
        for module in those(room)
        for one in imports(module)
        if one.module.partition(".")[0] in strangers
    ]
    assert not wrong


def room_of(module: str) -> str:
    """Return the innermost room that holds a module."""
    return max((room for room in ROOMS if inside(module, room)), key=len, default="")


def test_rooms_import_only_rooms_below_them() -> None:
    """Hold the order of ROOMS, without exceptions for functions or types."""
    wrong = []
    for module in those(*PACKAGES):
        height = ROOMS.index(room_of(module))
        wrong += [
            said(module, entry)
            for entry in mentioned(module)
            if entry.module in MODULES
            if room_of(entry.module) not in ROOMS[: height + 1]
        ]
    assert not wrong


def test_every_room_exists() -> None:
    assert not set(ROOMS) - MODULES.keys()


@pytest.mark.parametrize(("room", "doors"), DOORS.items())
def test_outside_imports_of_a_package_are_exactly_the_listed_modules(room: str, doors: set[str]) -> None:
    entered = {
        one.module
        for module in those("compiler", "scripts")
        for one in imports(module)
        if inside(one.module, room) and not inside(module, room)
    }
    assert entered == doors


def test_port_imports_exactly_the_listed_modules_of_other_packages() -> None:
    """Except for its scripts, which compare ports with whole runs, and are not distributed."""
    entered = {
        imported.module
        for module in set(those("port")) - set(those("port.scripts"))
        for imported in imports(module)
        if imported.module.partition(".")[0] in ("compiler", "runtime")
    }
    assert entered == READ_BY_PORT


def test_families_and_adapters_import_only_the_standard_library() -> None:
    """Check modules that compiler and runtime share. A family imports jax and Tunix only to build a model."""
    shared = those("runtime.model.families", "runtime.model.adapters", "runtime.model.reach")
    wrong = [
        said(module, one)
        for module in shared
        for one in imports(module)
        if not one.later
        and one.module not in sys.stdlib_module_names
        and one.module not in {*shared, "runtime.model.rope", "runtime.errors", "runtime.sections"}
    ]
    assert not wrong


def at_once(module: str) -> set[str]:
    """Return all modules that are imported with a module, including the packages around it."""
    found: set[str] = set()
    left = [module]
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        if name in MODULES:
            parts = name.split(".")
            left += [".".join(parts[:length]) for length in range(1, len(parts))]
            left += [one.module for one in imports(name) if not one.later]
    return found


def test_functions_import_only_heavy_packages() -> None:
    """Let a reader see at the top of a module what it uses.

    A module of this repository may be imported in a function if it brings a heavy package that the importer
    does without: torch for one backend, jax for a family that the compiler reads, Jinja for a check of chats.
    """
    wrong = [
        said(module, imported)
        for module in set(those("spec", "compiler", "runtime", "port"))
        for imported in imports(module)
        for heavy in [HEAVY if inside(module, "runtime") else HEAVY | SLOW]
        if imported.later and imported.module not in heavy
        if not at_once(imported.module) & heavy - at_once(module)
        if imported.module not in LATER.get(module, ())
    ]
    assert not wrong


def test_command_line_starts_without_the_modules_that_do_the_work() -> None:
    """Keep help and completion quick: they read the arguments of commands, and import no work."""
    arguments = those("compiler.cli.arguments")
    started = {
        name for module in ("compiler.cli.main", "port.options", *arguments) for name in at_once(module)
    }
    modules = started & MODULES.keys() - {"compiler.cli", "compiler.cli.main", *arguments}
    assert modules == STARTING
    assert not started & (HEAVY | SLOW | {"pydantic", "ruamel"})


def test_compiler_imports_only_packages_of_a_plain_installation() -> None:
    """Let `recipe build` work with a distribution that is installed without extras."""
    wrong = {}
    for module in set(those("spec", "compiler", "port")) - set(those(*ELSEWHERE, "port.scripts")):
        needed = {name for name in at_once(module) if name not in MODULES} - sys.stdlib_module_names
        if needed - BASE:
            wrong[module] = needed - BASE
    assert not wrong


def test_processes_that_tokenize_start_without_jax() -> None:
    """They are started for many rows, and importing jax takes longer than most of their work."""
    assert "numpy" in at_once("runtime.data.workers")
    assert at_once("runtime.data.workers").isdisjoint({"jax", "flax", "tunix", "qwix", "orbax", "grain"})


def test_backends_and_merges_import_no_package_that_their_requirements_lack() -> None:
    """Check what scripts import at their start: TRL's packages do not include jax, nor train.py's torch."""
    jax = {"jax", "flax", "optax", "orbax", "tunix", "qwix"}
    assert all(at_once(module).isdisjoint(jax) for module in those("runtime.backends.trl"))
    scripts = ("runtime.training.train", "runtime.merging.merge", "runtime.probe.probe")
    assert all(at_once(script).isdisjoint({"torch", "torchax", "peft", "trl"}) for script in scripts)


def test_listed_exceptions_import_an_optional_package() -> None:
    for part in ELSEWHERE:
        needed = {name for module in those(part) for name in at_once(module) if name not in MODULES}
        assert needed - sys.stdlib_module_names - BASE, f"{part} needs no exception"


def test_no_import_cycles() -> None:
    """Forbid cycles even of later imports: no module in a cycle can be understood without the others."""
    graph = {
        module: {one.module for one in imports(module) if one.module in MODULES} - {module}
        for module in those(*PACKAGES, "scripts")
    }
    while True:
        leaves = {module for module, others in graph.items() if not others & graph.keys()}
        if not leaves:
            break
        graph = {module: others for module, others in graph.items() if module not in leaves}
    # The rest is on a cycle, or imports one.
    while True:
        wanted = set().union(*graph.values()) if graph else set()
        outer = graph.keys() - wanted
        if not outer:
            break
        graph = {module: others for module, others in graph.items() if module not in outer}
    assert not graph


def test_modules_import_no_private_names_of_other_modules() -> None:
    suspects = [module for module, path in MODULES.items() if PRIVATE.search(path.read_text("utf-8"))]
    wrong = [
        said(module, one)
        for module in suspects
        for one in imports(module)
        if one.module in MODULES and re.match(r"_[^_]", one.name or "")
    ]
    assert not wrong


def test_modules_access_no_private_attributes_of_other_modules() -> None:
    wrong = []
    for module in those(*PACKAGES, "scripts"):
        aliases = {
            alias.asname or alias.name
            for node in nodes(module)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if f"{node.module}.{alias.name}" in MODULES
        }
        wrong += [
            f"{MODULES[module].relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
            for node in nodes(module)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            if node.value.id in aliases and re.match(r"_[^_]", node.attr)
        ]
    assert not wrong


def test_functions_have_at_most_seven_parameters() -> None:
    """Require an object for more parameters, except for listed scripts."""
    wrong = {}
    for module in those(*PACKAGES):
        for node in nodes(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args
                names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                count = len(names) - (names[:1] in (["self"], ["cls"]))
                if count > MOST_PARAMETERS:
                    wrong[f"{module}.{node.name}"] = count
    assert wrong.keys() == {*SCRIPTS, DECLARATION}, wrong


NAMELESS = {"found", "made", "given", "said", "own", "each", "one"}
"""Names of variables that say how a value came to be, whose it is or that it is one of several, and not what
it is."""


def bound(module: str) -> Iterator[tuple[str, int]]:
    """Yield the names that a module gives to values, with their lines."""
    for node in nodes(module):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.MatchAs | ast.MatchStar | ast.ExceptHandler) and node.name:
            yield node.name, node.lineno


def test_variables_are_named_by_what_they_hold() -> None:
    assert not [
        f"{MODULES[module].relative_to(ROOT)}:{line} {name}"
        for module in those("spec", "compiler", "runtime", "port")
        for name, line in bound(module)
        if name in NAMELESS
    ]


def test_modules_with_the_same_name_stand_in_rooms_that_are_divided_by_subject() -> None:
    """`errors.py` is allowed twice: the compiler's errors, and those of a script."""
    named: dict[str, list[str]] = {}
    for module in those("spec", "compiler", "runtime", "port"):
        path = MODULES[module].relative_to(ROOT)
        if not path.stem.startswith("__") and str(path.parent) not in NAMED_BY_SUBJECT:
            named.setdefault(path.name, []).append(str(path))
    assert {name: paths for name, paths in named.items() if len(paths) > 1} == {
        "errors.py": ["compiler/errors.py", "runtime/errors.py"]
    }


def test_architecture_page_lists_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    demanded = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    for extra in project["project"]["optional-dependencies"].values():
        demanded += extra
    names = {re.match(r"[\w.-]+", text)[0].lower() for text in demanded}  # type: ignore[index]
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    page = page.partition("\n## Dependencies\n")[2].partition("\nWritten by hand")[0]
    told = [
        name.lower()
        for cell in re.findall(r"^\| (`[^|]+) \|", page, re.M)
        for name in re.findall(r"`([^`]+)`", cell)
    ]
    assert sorted(set(told)) == sorted(told), "a dependency stands twice in docs/architecture.md"
    assert set(told) == names


def test_compiling_a_recipe_imports_no_heavy_packages(tmp_path: Path) -> None:
    """Block every package that a plain installation lacks."""
    heavy = [
        *("jax", "jaxlib", "numpy", "ml_dtypes", "flax", "optax", "orbax", "grain"),
        *("tunix", "qwix", "torch", "transformers"),
    ]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "recipe: 1\nname: example\nmodel: {id: google/gemma-4-31B-it}\n"
        "mesh: {accelerator: v5p-8, axes: {fsdp: 4}}\n"
        "lora: {rank: 16}\ndata: {train: [gs://bucket/train.jsonl]}\n"
        "serve: {accelerator: v6e-8, tensor_parallel_size: 8}\n"
    )
    program = (
        f"import sys\nfor name in {heavy!r}: sys.modules[name] = None\n"
        "from pathlib import Path\nfrom recipec.compiler.emitters.emit import emit\n"
        "from recipec.compiler.lower import lower\n"
        f"from recipec.spec.load import load\nprogram = lower(load(Path({str(recipe)!r}))).program\n"
        "assert 'train.py' in emit(program)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_text_of_each_mutant_occurs_exactly_once() -> None:
    """Check mutants early: CI does not run `make mutants`, and would not notice a mutant without its text."""
    whole = "\0".join(mutants.product(ROOT).values())
    assert {
        mutant.name: count for mutant in mutants.MUTANTS if (count := whole.count(mutant.text)) != 1
    } == {}


COMPUTING = (parts.Add, parts.Sub, parts.Mul, parts.Div, parts.FloorDiv, parts.Mod, parts.Pow, parts.Neg)
LOOKING_UP = {"get", "items"}
"""The methods that a template may call, besides its own macros."""


def test_templates_choose_and_repeat_but_compute_nothing() -> None:
    """Keep what a file says in its emitter: a template joins, quotes, chooses and repeats prepared values."""
    wrong = []
    for path in sorted((ROOT / "templates").rglob("*.j2")):
        parsed = Environment(trim_blocks=True).parse(path.read_text(encoding="utf-8"))
        macros = {macro.name for macro in parsed.find_all(parts.Macro)}
        places = [node.lineno for node in parsed.find_all(COMPUTING)]
        for call in parsed.find_all(parts.Call):
            method, name = getattr(call.node, "attr", None), getattr(call.node, "name", None)
            if method not in LOOKING_UP and name not in macros:
                places.append(call.lineno)
        wrong += [f"{path.relative_to(ROOT)}:{line}" for line in places]
    assert not wrong
