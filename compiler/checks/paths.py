"""Check paths: inputs must be below the recipe's folder, and outputs below the run's folder. No name, path or
address may be readable as something else in the files that contain it."""

from __future__ import annotations

import posixpath
import re
import sys
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from recipec.compiler.lowering.facts import Facts
from recipec.compiler.lowering.references import (
    IMPORTABLE,
    escapes,
    functions,
    inputs,
    is_inline,
    leads_out,
    names_nothing,
    outputs,
    schemas,
)
from recipec.spec.codes import Code
from recipec.spec.diagnostics import UNSHOWN, Diagnostic
from recipec.spec.key_paths import Part, join

ARTIFACT_FILES = (
    ".gitignore",
    "README.md",
    "recipe.yaml",
    "recipe.lock.json",
    *("train.py", "merge.py", "train_torchax.py", "probe.py", "probe_models.json", "notebook.ipynb"),
    *("requirements-train.txt", "requirements-torchax.txt", "requirements-eval.txt"),
    *("serve", "launch", "baseline"),
)
"""Names that an artifact's folder already contains."""

TEXTS = (
    ("data", "fields"),  # columns of the user's file, with any name
    ("serve", "smoke_prompts"),
    ("serve", "extra_args"),
    ("serve", "env"),  # has its own diagnostic code
    ("train", "grpo", "stop"),  # a line end is the most usual one
    ("rewards", "*", "format_match", "pattern"),
    ("rewards", "*", "*", "column"),
    ("data", "chat_template"),
    ("data", "*", "*", "chat_template"),
)
"""Keys whose values may contain any text, with `*` for any part: each of their emitters quotes them."""

RUN_BY_SHELLS = re.compile(r"\$\(|[`<>|&;]")
"""Characters that make a shell run a command or redirect output."""


NO_ARGUMENTS = ("lora", "sharding")
"""Sections whose texts are not part of any command line."""

LONGEST_NAME, LONGEST_PATH = 255, 1024
"""The most bytes of a file's name, in file systems, and of a path, in buckets."""

SYSTEM = ("bin", "boot", "dev", "etc", "lib", "lib64", "proc", "sbin", "sys", "usr")
"""Folders of / that belong to the operating system."""

IMPORTED = frozenset(
    {
        *sys.stdlib_module_names,
        *("runtime", "jax", "jaxlib", "libtpu", "optax", "orbax", "flax", "tunix", "qwix", "grain", "numpy"),
        *("safetensors", "transformers", "tokenizers", "huggingface_hub", "datasets", "pyarrow", "pandas"),
        *("torch", "torchax", "peft", "trl", "accelerate", "ml_dtypes", "jinja2", "fsspec", "gcsfs", "wandb"),
        *("mlflow", "tensorboardX", "tensorboard", "etils", "chex", "absl", "google", "yaml", "tqdm", "rich"),
    }
)
"""Modules that an artifact's scripts import. A file or folder of the same name next to them would shadow
them."""


INSTEAD = {"checkpoint.directory": "checkpoints", "merge.output": "merged", "cache.directory": "cache"}
"""A suggested place for each output."""


E0704 = Code(
    "E0704",
    "path leaves the recipe's folder",
    cause="The path is absolute, starts with ~, or leaves the folder with `..`. An artifact can be "
    "copied to any machine, so all its inputs must be below the recipe's folder.",
    cure="Put the file below the recipe's folder, or use a gs:// address.",
)


def check(facts: Facts) -> Iterator[Diagnostic]:
    yield from _characters(facts)
    recipe = facts.recipe
    data, copied, written = [*inputs(recipe).items()], _copied(facts), [*outputs(recipe).items()]
    yield from _shadowing([*data, *copied])
    for where, path in copied:
        yield from _linked(facts, where, path)
    yield from _too_long([*data, *copied, *written])
    for where, path in [*data, *copied]:
        if names_nothing(path):
            yield _nothing(where, path)
        elif escapes(path):
            instead = ", or name a gs:// address" if (where, path) in data else ""
            yield Diagnostic(
                E0704,
                f"`{path}` leaves the recipe's folder: a copy of the artifact would not find it",
                where,
                f"put the file below the recipe's folder{instead}",
            )
    yield from _written(written)
    if recipe.checkpoint.local is not None:
        yield from _local(recipe.checkpoint.local.directory)


def _copied(facts: Facts) -> list[tuple[str, str]]:
    """Return the files next to the recipe that its artifact copies, with the recipe paths that name them."""
    recipe, prompts = facts.recipe, facts.recipe.evaluate.prompts
    files = []
    files += [(place, text) for place, text in recipe.data.templates.items() if not is_inline(text)]
    files += [(place, function.partition(":")[0]) for place, function in functions(recipe).items()]
    files += [*schemas(recipe).items()]
    if prompts is not None:
        files.append(("evaluate.prompts", prompts))
    return files


E0707 = Code(
    "E0707",
    "character with a special meaning",
    cause="A path, name or address contains a line break, another control character or a mark that "
    "changes the direction of text. It could end the comment or command that it is written into, or "
    "look like another name. The shell of the machine that fetches an output also reads the "
    "output's folder name.",
    cure="Write it without that character, and rename the file.",
)

E0711 = Code(
    "E0711",
    "text that would be read as an option",
    cause="The text starts with `-`. Commands of the artifact take it as an argument, and would read "
    "it as an option.",
    cure="Use another name. A file can be written as ./NAME.",
)


def _characters(facts: Facts) -> Iterator[Diagnostic]:
    """Report values that would end the line that they are written into, or that a command would read as an
    option."""
    values = facts.recipe.model_dump(exclude_unset=True)
    for where, text in _strings(values, ()):
        bad = next((c for c in text if unicodedata.category(c) in UNSHOWN), None)
        free = _is_text(where)
        if bad is not None and not free:
            yield Diagnostic(
                E0707,
                f"`{join(where)}` contains the character U+{ord(bad):04X}, which ends a line or is invisible",
                join(where),
                "remove it",
            )
        exempt = free or where[0] in NO_ARGUMENTS
        if text.startswith("-") and not exempt and not text.startswith("-----"):  # a PEM key: a secret
            yield Diagnostic(
                E0711,
                f"`{join(where)}` starts with `-`: commands would read it as an option",
                join(where),
                "give it another name; a file can be written as ./NAME",
            )


def _is_text(where: tuple[Part, ...]) -> bool:
    """Return whether a value, or one that it is part of, may contain any text."""
    return any(
        len(where) >= len(key) and all(part in ("*", name) for part, name in zip(key, where, strict=False))
        for key in TEXTS
    )


E0710 = Code(
    "E0710",
    "name too long",
    cause="File systems allow names of at most 255 bytes. Buckets allow paths of at most 1,024 bytes, "
    "and longer ones leave no room for the folder that they are relative to.",
    cure="Use a shorter name.",
)


def _too_long(paths: list[tuple[str, str]]) -> Iterator[Diagnostic]:
    """Report files and folders whose names are too long for file systems or buckets."""
    for where, path in paths:
        parts = path.encode("utf-8", "surrogatepass").split(b"/")
        longest = max(map(len, parts))
        if longest > LONGEST_NAME:
            what = (
                f"has a name of {longest:,} bytes, and names of files and folders have at most {LONGEST_NAME}"
            )
        elif (size := len(b"/".join(parts))) > LONGEST_PATH:
            what = f"has {size:,} bytes, and a path has at most {LONGEST_PATH:,}"
        else:
            continue
        yield Diagnostic(E0710, f"`{where}` {what}", where, "choose a shorter name")


E0712 = Code(
    "E0712",
    "incomplete address",
    cause="There is no bucket, host or data set after `://`, or `..` leads out of it.",
    cure="Write the whole address, such as gs://bucket/folder or hf://owner/name.",
)


def _nothing(where: str, path: str) -> Diagnostic:
    return Diagnostic(
        E0712,
        f"`{path}` names no bucket, host or data set, or leaves it with `..`",
        where,
        "write the whole address, such as gs://BUCKET/FOLDER or hf://OWNER/NAME, or a local path",
    )


E0713 = Code(
    "E0713",
    "local checkpoints in a system folder",
    cause="checkpoint.local.directory is / or is in a system folder such as /etc, /usr or /dev, "
    "possibly through `..`. Old checkpoints in this folder are deleted when newer ones are saved.",
    cure="Use a folder in memory below /dev/shm, or on an attached disk.",
)


def _local(directory: str) -> Iterator[Diagnostic]:
    """Refuse system folders for checkpoints on each host's own disk: old checkpoints are deleted there."""
    plain = posixpath.normpath(f"/{directory.lstrip('/')}")
    if plain.startswith("/dev/shm/") or (plain != "/" and plain.split("/")[1] not in SYSTEM):
        return
    yield Diagnostic(
        E0713,
        f"`{directory}` is {plain}, a system folder",
        "checkpoint.local.directory",
        "directory: /dev/shm/recipec, or a folder on an attached disk such as /mnt/disks/local",
    )


def _strings(value: Any, where: tuple[Part, ...]) -> Iterator[tuple[tuple[Part, ...], str]]:
    """Yield every text in a value, including keys, with its path."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, str):
                yield (*where, key), key
                yield from _strings(item, (*where, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _strings(item, (*where, index))


E0709 = Code(
    "E0709",
    "name that Python would import",
    cause="The file would be next to train.py in the artifact, with the name of a module that the "
    "scripts import. Python would run it instead of the module, even if the recipe uses it as text "
    "or data.",
    cure="Use another name for the file or folder.",
)


def _shadowing(files: list[tuple[str, str]]) -> Iterator[Diagnostic]:
    """Report files next to train.py that Python would import by mistake, running their code."""
    for where, path in files:
        parts = PurePosixPath(path.replace("\\", "/")).parts
        if "://" in path or not parts:
            continue
        module = parts[0].partition(".")[0]
        code = where.endswith((".transform", ".function"))
        if not code and path.lower().endswith(IMPORTABLE):
            reason = "is a file that Python imports"
        elif code and module in IMPORTED:
            reason = f"is where Python looks for its module `{module}`"
        else:
            continue
        yield Diagnostic(
            E0709, f"`{path}` {reason}: every script would run it", where, "give it another name"
        )


E0708 = Code(
    "E0708",
    "link out of the recipe's folder",
    cause="A file that is copied into the artifact is a symbolic link, or is behind one, to a place "
    "outside of the recipe's folder. Any file of the machine could be copied this way.",
    cure="Put a copy of the file below the recipe's folder.",
)


def _linked(facts: Facts, where: str, path: str) -> Iterator[Diagnostic]:
    """Report a file of the artifact that a link places outside the recipe's folder."""
    if "://" not in path and not escapes(path) and leads_out(facts.folder, path):
        yield Diagnostic(
            E0708,
            f"`{path}` leads out of the recipe's folder through a link: the file there would be copied into "
            "the artifact",
            where,
            "replace the link with a copy of the file",
        )


E0505 = Code(
    "E0505",
    "checkpoints and merged model in one folder",
    cause="checkpoint.directory and merge.output are the same folder, or one is inside the other.",
    cure="Use two separate folders.",
)

E0705 = Code(
    "E0705",
    "output outside the run's folder",
    cause="checkpoint.directory, cache.directory or merge.output is absolute or leaves the folder "
    "with `..`. Or one of the first two is an address other than gs://.",
    cure="Use a relative folder. It is relative to --output of train.py and merge.py.",
)

E0706 = Code(
    "E0706",
    "output overwrites the artifact's files",
    cause="checkpoint.directory or merge.output is the artifact's folder itself, or one of its files "
    "or folders.",
    cure="Use another folder name.",
)


def _written(outputs: list[tuple[str, str]]) -> Iterator[Diagnostic]:
    for where, path in outputs:
        address = path.startswith("gs://") or (where == "merge.output" and "://" in path)
        if names_nothing(path):
            yield _nothing(where, path)
        elif escapes(path) or ("://" in path and not address):
            yield Diagnostic(
                E0705,
                f"`{path}` is not below the run's output folder",
                where,
                f"{where.partition('.')[2]}: {INSTEAD[where]}, or a gs:// address; the folder is relative to "
                "--output of train.py and merge.py",
            )
        elif address:
            continue
        elif sign := RUN_BY_SHELLS.search(path):
            yield Diagnostic(
                E0707,
                f"`{path}` contains `{sign[0]}`, which the shell that fetches the folder would interpret",
                where,
                "name a folder of letters, digits, `.`, `_` and `-`",
            )
        elif (first := (_plain(path).parts or (".",))[0]) in (*ARTIFACT_FILES, "."):
            yield Diagnostic(
                E0706,
                f"`{path}` would overwrite the artifact's own {'folder' if first == '.' else first}",
                where,
                f"{where.partition('.')[2]}: {INSTEAD[where]}",
            )
    directory, output = (_plain(path) for _, path in outputs[:2])
    if directory == output or directory in output.parents or output in directory.parents:
        yield Diagnostic(
            E0505,
            f"checkpoint.directory `{outputs[0][1]}` and merge.output `{outputs[1][1]}` overlap: "
            "a merge would mix its files with the checkpoints",
            "merge.output",
            f"output: {outputs[0][1].rstrip('/')}-merged",
        )


def _plain(path: str) -> PurePosixPath:
    """Return a path without `.` and `..`; a bucket's path starts with /gs."""
    return PurePosixPath(posixpath.normpath(path.replace("gs://", "/gs/")))
