"""The commands of the pages' `sh` blocks: which ones run and how, and why the others do not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipec.compiler.cli.main import app
from recipec.compiler.rehearse import quickstart
from recipec.port.scripts import coming_from
from tests.docs import shell
from tests.docs.blocks import Block
from tests.report import writing
from tests.watch import watching

NOT_RUN = {
    "make": "it installs, trains or builds for minutes",
    "pre-commit": "it changes the settings of a clone",
    **dict.fromkeys(("pip", "pipx", "python venv", "uv"), "it installs"),
    **dict.fromkeys(("source", "export"), "it changes the reader's shell"),
    **dict.fromkeys(("recipe plan", "recipe port --plan"), "it compiles for minutes"),
    **dict.fromkeys(("recipe parity", "recipe rehearse", "python train.py"), "it trains"),
    **dict.fromkeys(("recipe adapters", "recipe chat", "recipe push"), "it wants weights"),
    "recipe preview": "it wants the model's tokenizer",
    "recipe serve": "it wants Docker, or a server",
    "recipe calibrate": "it wants a machine's probe",
    "recipe report --open": "it opens a browser",
    "python pytest": "it is what runs here",
    **dict.fromkeys(("python recipec", "python scripts"), "it rewrites this repository's files"),
    "python merge.py": "it wants a run's checkpoints",
    **dict.fromkeys(("gcloud", "kubectl", "sky"), "it wants a cloud"),
    "tensorboard": "it serves until it is ended",
    "wandb": "it wants an account",
}
"""Commands of which only the options and files are checked, and why."""

SHELL = ("cat", "cp", "head", "ls", "mkdir")
PARSED = "parsed: "
"""The start of the remark above a block whose commands do not run; the reason follows."""
EACH = "each"
"""The remark above a block of alternative commands: each runs in an unchanged folder."""


GCLOUD = """\
#!/bin/sh
[ "$*" = "config get-value account" ] || exit 1
echo reader@example.com
"""
"""What tpu-vm.sh asks for a machine's name also in a dry run. The real one takes longer than the script."""


def sign_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a gcloud into an empty folder, and the folder at the head of PATH."""
    gcloud = folder / "gcloud"
    gcloud.write_text(GCLOUD, encoding="utf-8")
    gcloud.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def reason(words: Sequence[str]) -> str | None:
    """Return why a command does not run, or None."""
    if (name := listed(words)) is not None:
        return NOT_RUN[name]
    if any("://" in word for word in words if "hf://" not in word):
        return "it wants a network"
    if any(shell.PLACEHOLDER.fullmatch(part) for word in words for part in word.split("/")):
        return "it names what a reader puts in"
    return None


def listed(words: Sequence[str]) -> str | None:
    """Return the entry of NOT_RUN for a command."""
    program, *rest = [Path(words[0]).name, *words[1:]]
    if program == "recipe" and rest:
        program = f"recipe {rest[0]}"
    elif re.fullmatch(r"python[\d.]*", program):
        script = rest[1].partition(".")[0] if rest[0] == "-m" else rest[0]
        program = (
            f"python {Path(script).name if Path(script).name in shell.SCRIPTS else Path(script).parts[0]}"
        )
    names = [program, *(f"{program} {word}" for word in rest if word.startswith("--"))]
    return next((name for name in names if name in NOT_RUN), None)


def problems(block: Block, folder: Path) -> Iterator[str]:
    """Yield the errors of a block's commands, which run in a page's folder in order."""
    if block.remark == "slow" or block.remark.startswith(PARSED):
        return
    if block.remark == EACH:
        for number, words in enumerate(shell.commands(block.text)):
            place = folder.parent / f"{folder.name}-{block.line}-{number}"
            shutil.copytree(folder, place, symlinks=True)
            with chdir(place):
                yield from _problem(words)
        return
    with chdir(folder):
        for words in shell.commands(block.text):
            yield from _problem(words)


def _problem(words: shell.Words) -> Iterator[str]:
    if reason(words) is not None:
        return
    words[:] = map(_expanded, words)
    if len(words) == 1 and (assignment := re.fullmatch(r"(\w+)=(.*)", words[0])):
        os.environ[assignment[1]] = assignment[2]
        return
    if words[0] == "cd":
        os.chdir(words[1])
        return
    status, out, error = _run(words)
    if words.into:
        Path(words.into).write_text(out, encoding="utf-8")
    if status:
        yield f"`{' '.join(words)}` exits with {status}:\n{error}{out}"


def _expanded(word: str) -> str:
    """Replace a word's "$NAME" by the variable, and its "$(command)" by the command's output."""
    word = re.sub(r"\$(\w+)", lambda name: os.environ.get(name[1], ""), word)
    return re.sub(r"\$\((.*)\)", lambda command: _run(next(shell.commands(command[1])))[1].strip(), word)


def _run(words: shell.Words) -> tuple[int, str, str]:
    """Run a command, and return its exit status, stdout and stderr."""
    program, arguments = words[0].removeprefix(".venv/bin/"), words[1:]
    if program == "recipe":
        files = [
            path
            for word in arguments
            for path in (sorted(map(str, Path().glob(word))) if "*" in word else [word])
        ]
        done = CliRunner().invoke(app, files, env={"COLUMNS": "100", "NO_COLOR": "1"})
        raised = done.exception
        failed = "" if raised is None or isinstance(raised, SystemExit) else repr(raised)
        return done.exit_code, done.stdout, f"{done.stderr}{failed}"
    if program.endswith("/tpu-vm.sh"):
        arguments = ["--dry-run", *arguments]  # show gcloud's commands, and run none
    elif program not in SHELL:
        return 1, "", f"tests/docs/running.py does not say what to do with `{program}`\n"
    try:
        done = subprocess.run(
            [program, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20
        )
    except OSError as error:
        return 127, "", f"{error}\n"
    return done.returncode, done.stdout, done.stderr


def _runs(folder: Path) -> None:
    for name in ("generated/quickstart/checkpoints", "runs/fast/checkpoints", "runs/slow/checkpoints"):
        watching.state(writing.run(folder / name, steps=20), "done", total=20, until=20)
    for name in ("low-rate", "high-rate"):
        (folder / "runs" / name).symlink_to("fast/checkpoints")


PARSER = """\
from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config

parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
script_args, training_args, model_args = parser.parse_args_and_config()
dataset = load_dataset(script_args.dataset_name)
trainer = SFTTrainer(
    model=model_args.model_name_or_path,
    args=training_args,
    train_dataset=dataset[script_args.dataset_train_split],
    peft_config=get_peft_config(model_args),
)
trainer.train()
"""
"""A script whose values come from a YAML file."""


def _configs(folder: Path) -> None:
    """Write another tool's config and its launcher's, a script of two commands, and a folder of configs."""
    examples = shell.ROOT / "tests" / "port" / "examples"
    shutil.copy(examples / "trl-llama32-fsdp" / "sft.yaml", folder / "config.yml")
    shutil.copy(examples / "trl-llama32-fsdp" / "accelerate.yaml", folder)
    train = "trl sft --config config.yml --learning_rate"
    (folder / "train.sh").write_text(f"{train} 1e-4\n{train} 2e-4\n", encoding="utf-8")
    (folder / "train.py").write_text(PARSER, encoding="utf-8")
    (folder / "configs").mkdir()
    shutil.copy(folder / "config.yml", folder / "configs")


def _tools(folder: Path) -> None:
    """Write a config of each tool, and a script."""
    examples = shell.ROOT / "tests" / "port" / "examples"
    for example, names in {
        "axolotl-gemma4-qlora": {"support-qlora.yml": "axolotl.yml"},
        "llamafactory-qwen3-lora": {"notes-lora.yaml": "llamafactory.yaml", "dataset_info.json": ""},
        "trl-llama32-fsdp": {"sft.yaml": "trl.yaml", "accelerate.yaml": ""},
        "maxtext-qwen3-lora": {"sft.yml": "maxtext.yml"},
    }.items():
        for name, here in names.items():
            shutil.copy(examples / example / name, folder / (here or name))
    calls = dict.fromkeys(coming_from.CALLS, "")
    calls |= {"from_pretrained": "'unsloth/Qwen3-8B'", "SFTConfig": "learning_rate=2e-4, max_steps=9"}
    (folder / "train.py").write_text(coming_from.SCRIPT.format_map(calls), encoding="utf-8")


def _model(folder: Path) -> None:
    """Write the model that `make quickstart` trains."""
    quickstart.write_model(folder / "build" / "quickstart" / "model", quickstart.compiled())


def _base(folder: Path) -> None:
    """Write the recipe that the schema's example of `extends` names."""
    shutil.copy(folder / "recipes" / "quickstart.yaml", folder / "base.yaml")
    shutil.copytree(folder / "recipes" / "data", folder / "data", dirs_exist_ok=True)


THERE: dict[str, Callable[[Path], None]] = {
    "language.md": _base,
    "data.md": _model,
    "monitoring.md": _runs,
    "reports.md": _runs,
    "porting.md": _configs,
    "coming-from.md": _tools,
}
"""Files of a page's folder that a clone lacks."""
