"""Find the files of runtime/ that an artifact needs: those that its own files call, and all their imports.

An import at the top of a module is always needed. An import within a function is needed too, unless it
belongs to a part listed in OPTIONAL that the recipe does not use.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from recipec import runtime
from recipec.compiler.lowering.catalog import entry_of
from recipec.compiler.lowering.sources import COMPRESSIBLE, addresses, inputs
from recipec.runtime.model.families import ANY, FAMILIES
from recipec.runtime.model.families.gemma4 import Gemma4Architecture
from recipec.runtime.model.recomputed import OF_TUNIX
from recipec.runtime.peft.known import has_parameters
from recipec.runtime.training.objectives import NLL, OBJECTIVES
from recipec.runtime.weights.agreement import QUANTIZATION

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program

ROOT = "runtime"
CALLED = re.compile(r"-m (runtime(?:\.\w+)+)|\bruntime/((?:[\w-]+/)*[\w-]+\.(?:py|sh))\b")
"""Matches how a shell script, a manifest or a page calls a module or a script of runtime/."""

PROMPTED = frozenset(("prompt_completion", "preference", "unpaired_preference"))
"""The formats of data with prompts and completions."""

Asked = Callable[["Program"], Any]


def _is_of(family: str, program: Program) -> bool:
    return program.family.name == family


def _in_fp8(program: Program) -> bool:
    """Return whether the base may be stored in FP8: a copy of a catalog model may be stored as its original
    is."""
    config = program.config
    if program.model_origin == "catalog" and (entry := entry_of(program.recipe.model.id)) is not None:
        config = entry["config"]
    return (config.get(QUANTIZATION) or {}).get("quant_method") == "fp8"


def _in_mxfp4(program: Program) -> bool:
    return "mxfp4" in program.family.quantized


def _sources(program: Program) -> list[str]:
    """Return the paths of all files that are read as data."""
    return [path for place, path in inputs(program.recipe).items() if place != "lora.start_from"]


def _of_ending(endings: Sequence[str], program: Program) -> list[bool]:
    """Return whether each file of data has one of the endings, compressed or not."""
    texts = tuple(f"{ending}{packed}" for ending in endings for packed in ("", ".gz", ".zst"))
    return [path.lower().endswith(texts) for path in _sources(program)]


def _other_files(program: Program) -> bool:
    """Return whether any data is not in plain text files: columnar files, folders, or data sets on the
    hub."""
    return not all(_of_ending(COMPRESSIBLE, program))


def _reads(ending: str, program: Program) -> bool:
    """Return whether data may be in text files of this ending; a folder may hold them too."""
    return any(_of_ending([ending], program)) or _other_files(program)


def _names_addresses(program: Program) -> bool:
    return bool(addresses(program.recipe))


def _evaluates(program: Program) -> bool:
    return bool(program.recipe.data.eval) or program.recipe.data.eval_fraction is not None


def _draws_by_weight(program: Program) -> bool:
    """Return whether epochs draw from sources by weight; evaluation draws from each source alone."""
    data = program.recipe.data
    weights = any(source.weight != 1 for source in data.train)
    return weights or data.temperature is not None or _evaluates(program)


def _has_pairs(program: Program) -> bool:
    return OBJECTIVES[program.recipe.train.objective].pairs


def _has_losses(program: Program) -> bool:
    return bool(OBJECTIVES[program.recipe.train.objective].format)


def _weighs_tokens(program: Program) -> bool:
    return not _has_losses(program) and program.recipe.train.loss_type != NLL


def _is_row_bound(program: Program) -> bool:
    """Return whether the loss may depend on how many rows a micro-batch has."""
    train = program.recipe.train
    by_rows = train.loss_normalization == "micro_batches" or train.router_aux_loss_coef
    return bool(by_rows) or train.objective != "sft"


def _has_parts(program: Program) -> bool:
    """Return whether a Gemma 4 has experts, or embeddings for each layer."""
    a = program.architecture
    return isinstance(a, Gemma4Architecture) and bool(a.experts or a.per_layer_input)


def _trains_rows(program: Program) -> bool:
    return program.lora is not None and bool(program.lora.train_tokens)


def _of(asks: Asked, room: str, *names: str) -> dict[str, Asked]:
    """Return a function for several modules of a room of runtime/."""
    return dict.fromkeys((f"runtime.{room}.{name}" for name in names), asks)


OPTIONAL: Mapping[str, Asked] = {
    **{f"runtime.model.families.{name}": functools.partial(_is_of, name) for name in (*FAMILIES, ANY)},
    **_of(
        lambda program: program.recipe.model.attention == "splash",
        "model",
        *("attention", "attention_blocks", "context"),
    ),
    "runtime.model.layer_ranges": lambda program: program.recipe.lora and program.recipe.lora.layers != "all",
    "runtime.model.remat": lambda program: program.recipe.remat.policy not in OF_TUNIX,
    "runtime.backends.torchax.logits": lambda program: not program.family.tunix,
    **_of(_other_files, "data", "column_files", "huggingface"),
    "runtime.data.csv_files": lambda program: _reads(".csv", program),
    "runtime.data.json_files": lambda program: _reads(".json", program),
    "runtime.data.instructions": lambda program: "instruction" in program.recipe.data.formats,
    "runtime.data.prompted": lambda program: bool(program.recipe.data.formats & PROMPTED),
    "runtime.data.texts": lambda program: bool(program.recipe.data.formats & {"text", *PROMPTED}),
    "runtime.data.evaluation": _evaluates,
    "runtime.training.evaluating": _evaluates,
    "runtime.data.remote_content": lambda program: any("://" in path for path in _sources(program)),
    **dict.fromkeys(
        (
            "runtime.stores",
            "runtime.checkpoints.bucket",
            "runtime.merging.remote_folder",
            "runtime.weights.remote",
        ),
        _names_addresses,
    ),
    "runtime.data.division": lambda program: program.recipe.data.eval_fraction is not None,
    "runtime.data.weighted": _draws_by_weight,
    "runtime.data.tempering": lambda program: program.recipe.data.temperature is not None,
    "runtime.data.reasoning": lambda program: program.recipe.data.reasoning,
    "runtime.data.literal_tokens": lambda program: program.recipe.data.special_tokens == "text",
    **_of(lambda program: program.recipe.data.stream_window is not None, "data", "stream", "shards"),
    "runtime.data.transform": lambda program: program.recipe.data.transforms,
    "runtime.model.delta": lambda program: getattr(program.architecture, "delta", None),
    "runtime.model.mamba": lambda program: getattr(program.architecture, "mamba", None),
    "runtime.model.mamba1": lambda program: getattr(getattr(program.architecture, "mamba", None), "rank", 0),
    "runtime.model.short_conv": lambda program: getattr(program.architecture, "conv", None),
    "runtime.model.states": lambda program: program.architecture.stateful,
    **dict.fromkeys(
        (
            *("runtime.metrics.expert_shares", "runtime.model.balance", "runtime.model.experts"),
            *("runtime.model.expert_layout", "runtime.merging.expert_sampling", "runtime.training.balanced"),
        ),
        lambda program: program.architecture.routing[0] > 0,
    ),
    "runtime.peft.parameters": lambda program: program.lora is not None and has_parameters(program),
    "runtime.model.gemma4_parts": _has_parts,
    "runtime.model.mixture": lambda program: getattr(program.architecture, "experts", None),
    "runtime.model.gemma4_experts": lambda program: getattr(program.architecture, "expert_size", 0),
    **_of(lambda program: _in_fp8(program) or _in_mxfp4(program), "weights", "formats", "packed"),
    "runtime.weights.fp8": _in_fp8,
    "runtime.weights.mxfp4": _in_mxfp4,
    "runtime.merging.own_files": lambda program: (
        program.recipe.model.tokenizer is not None
        or program.recipe.data.chat_template is not None
        or program.recipe.model.add_tokens
    ),
    **_of(lambda program: program.recipe.merge.quantization, "merging", "quantized", "quantized_sampling"),
    **dict.fromkeys(
        (f"runtime.{name}" for name in ("hosts.group", "hosts.watched", "hosts.local", "metrics.nowhere")),
        lambda program: program.accelerator.hosts > 1,
    ),
    **dict.fromkeys(
        (
            *("runtime.checkpoints.full", "runtime.merging.whole_sampling"),
            *("runtime.model.whole", "runtime.model.whole_arrays"),
        ),
        lambda program: program.lora is None or program.lora.trains_whole,
    ),
    **_of(lambda program: program.lora, "peft", "adapter", "exporting", "fitting", "importing"),
    "runtime.training.start_from": lambda program: program.lora and program.lora.start_from,
    "runtime.checkpoints.local_saving": lambda program: program.recipe.checkpoint.local,
    "runtime.data.preferences": _has_pairs,
    "runtime.training.pair_losses": _has_pairs,
    "runtime.training.token_losses": _weighs_tokens,
    **_of(_has_losses, "training", "preference", "logps"),
    "runtime.training.objective_losses": lambda program: _has_losses(program) or _weighs_tokens(program),
    "runtime.checkpoints.row_bound": _is_row_bound,
    **dict.fromkeys(
        ("runtime.data.unpaired", "runtime.training.kto", "runtime.training.unpaired"),
        lambda program: _has_losses(program) and not _has_pairs(program),
    ),
    "runtime.model.quantize": lambda program: program.lora and program.lora.quantize,
    "runtime.weights.grown": lambda program: program.recipe.model.vocab_size,
    "runtime.data.new_tokens": lambda program: program.recipe.model.add_tokens or _trains_rows(program),
    "runtime.model.token_rows": _trains_rows,
    "runtime.model.dora": lambda program: program.lora and program.lora.kind == "dora",
    **dict.fromkeys(
        ("runtime.model.principal", "runtime.training.first_values"),
        lambda program: program.lora and program.lora.principal,
    ),
    "runtime.training.loftq": lambda program: program.lora and program.lora.init == "loftq",
    "runtime.model.noise": lambda program: program.recipe.train.neftune_noise_alpha,
    "runtime.model.fake_quantize": lambda program: program.recipe.train.qat,
    "runtime.model.eight_bits": lambda program: program.lora and program.lora.products,
    "runtime.metrics.remote": lambda program: "://" in program.recipe.checkpoint.directory,
    "runtime.metrics.services": lambda program: (
        program.recipe.train.log.wandb_project or program.recipe.train.log.mlflow_experiment
    ),
    "runtime.metrics.wandb_log": lambda program: program.recipe.train.log.wandb_project,
    "runtime.metrics.mlflow_log": lambda program: program.recipe.train.log.mlflow_experiment,
    "runtime.probe.served": lambda program: program.recipe.serve and program.recipe.launch.kind,
    "runtime.data.prompts": lambda program: program.recipe.train.samples,
    "runtime.training.answers": lambda program: program.recipe.train.samples,
}
"""Modules that only some artifacts have, by name, with the function that says whether a recipe uses them."""

STARTED = ("runtime.data.worker",)
"""Modules that other modules start in separate processes, without importing them."""


@dataclass(frozen=True)
class Imports:
    """The full names that a module imports, each of a module or of something inside one."""

    top: frozenset[str]
    within: frozenset[str]


@functools.cache
def runtime_files() -> dict[str, bytes]:
    """Return the modules and scripts of runtime/ by path relative to it."""
    folder = Path(runtime.__file__).parent
    return {path: (folder / path).read_bytes() for path in modules(folder)}


def modules(folder: Path) -> list[str]:
    """Return the Python modules and shell scripts below a folder, relative to it, sorted."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        within = PurePosixPath(Path(place).relative_to(folder).as_posix())
        found += [str(within / name) for name in names if name.endswith((".py", ".sh"))]
    return sorted(found)


def needed(program: Program, files: Mapping[str, bytes], there: Mapping[str, bytes]) -> list[str]:
    """Return the files of runtime/ that an artifact needs, by path relative to it, sorted.

    Args:
        files: the artifact's own files.
        there: all files of runtime/, by path relative to it.
    """
    asked = [name for name, asks in OPTIONAL.items() if asks(program)]
    found: set[str] = set()
    seen: set[str] = set()
    waiting = {*STARTED, *asked, *_called(files)}
    passed_over = tuple(f"{name}." for name in OPTIONAL.keys() - asked)
    while waiting:
        seen |= waiting
        fresh = {path for name in waiting for path in _paths(name, there)} - found
        found |= fresh
        waiting = {name for path in fresh for name in _asks(path, there[path], passed_over)} - seen
    return sorted(found)


def called_scripts(paths: Iterable[str], there: Mapping[str, bytes]) -> set[str]:
    """Return shell scripts of runtime/ and all scripts that they source or call, by path relative to it."""
    found: set[str] = set()
    waiting = set(paths)
    while waiting:
        found |= waiting
        waiting = {
            called
            for path in waiting
            for called in _called_by(there[path])
            if called.endswith(".sh") and called in there
        } - found
    return found


def _called(files: Mapping[str, bytes]) -> Iterator[str]:
    """Yield what an artifact's own files call or import."""
    for path, content in files.items():
        if path.endswith(".py"):
            imports = imports_of(content, "")
            yield from imports.top | imports.within
        else:
            yield from _called_by(content)


def _called_by(content: bytes) -> Iterator[str]:
    for module, path in CALLED.findall(content.decode("utf-8", "replace")):
        yield module or path


def _asks(path: str, content: bytes, passed_over: tuple[str, ...]) -> Iterator[str]:
    """Yield what a file of runtime/ imports or calls, except for parts that the recipe does not use."""
    if not path.endswith(".py"):
        yield from _called_by(content)
        return
    imports = imports_of(content, package_of(path))
    yield from imports.top
    yield from (name for name in imports.within if not f"{name}.".startswith(passed_over))


def _paths(name: str, there: Mapping[str, bytes]) -> Iterator[str]:
    """Yield the file of a module, or of the module that a name is in, and the files of the enclosing
    packages."""
    if name in there:
        yield name
        return
    parts = name.split(".")
    if parts[0] != ROOT:
        return
    for count in range(len(parts) + 1):
        stem = "/".join(parts[1:count])
        for path in (f"{stem}.py", f"{stem}/__init__.py" if stem else "__init__.py"):
            if path in there:
                yield path


def package_of(path: str) -> str:
    """Return the package that relative imports of a file of runtime/ start from."""
    return ".".join((ROOT, *Path(path).parts[:-1]))


STATEMENT = re.compile(
    r"^([ \t]*)(?:(?P<function>(?:async )?def )|(?P<types>if TYPE_CHECKING:)"
    r"|(?:from (?P<module>[.\w]+) )?import (?P<names>\([^)]*\)|[^\n(]+)"
    r"|(?:class|if|elif|else|try|except|finally|for|while|with|match|case|async)\b)",
    re.MULTILINE,
)
"""Matches imports and the statements that may enclose them. Parsing whole modules would take half of a
build's time."""


@functools.lru_cache(maxsize=1024)
def imports_of(content: bytes, package: str) -> Imports:
    """Return what a module imports from runtime/, without imports for types only, from lines and
    indentation."""
    names: dict[bool, set[str]] = {True: set(), False: set()}
    around: list[tuple[int, str | None]] = []
    for found in STATEMENT.finditer(content.decode("utf-8", "replace")):
        depth = len(found[1])
        while around and around[-1][0] >= depth:
            around.pop()
        kinds = {kind for _, kind in around}
        if found["names"] is None:
            around.append((depth, found.lastgroup))
        elif "types" not in kinds:
            names["function" in kinds] |= {*_imported(found["module"], found["names"], package)}
    top, within = names[False], names[True]
    return Imports(
        *(frozenset(name for name in some if name.split(".")[0] == ROOT) for some in (top, within - top))
    )


def _imported(module: str | None, names: str, package: str) -> Iterator[str]:
    """Yield the full names that one statement imports."""
    bare = re.sub(r"#.*", "", names).strip("() \t\n")
    each = [name.split()[0] for name in bare.split(",") if name.strip()]
    if module is None:
        yield from each
        return
    rest = module.lstrip(".")
    if level := len(module) - len(rest):
        above = package.split(".")
        rest = ".".join([*above[: len(above) - level + 1], *([rest] if rest else [])])
    yield rest
    yield from (f"{rest}.{name}" for name in each)
