"""Tests of the gcloud and kubectl commands of the docs and of launch/tpu-vm.sh, with these programs' parsers.

Neither contacts a cloud: `gcloud meta lint-gcloud-commands` only parses commands, and kubectl refuses unknown
arguments before it looks for a cluster.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.emitters.launch import emit_launch
from tests.emit.clouds import launch_scripts
from tests.emit.emitting import program_of
from tests.emit.launch_shapes import BASE, SHAPES

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("first-tpu", "launch", "start", "storage", "multi-host", "preemption")
COMMANDS = (
    *(["up"], ["--queue", "up"], ["push"], ["setup"], ["probe", "sample"], ["train"], ["logs"], ["status"]),
    *(["stop"], ["merge"], ["fetch"], ["fetch", "merged"], ["down", "sample"]),
)
pytestmark = pytest.mark.nightly


def with_program(name: str) -> Any:
    return pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed: nothing is tried")


def of_pages(program: str) -> list[str]:
    """Return a program's commands from the docs' code blocks, with real names for the placeholders."""
    found = []
    for page in PAGES:
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        for block in re.findall(r"^```sh.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            found += [
                line
                for line in re.sub(r"\\\n\s*", "", block).replace("PROJECT", "my-project").splitlines()
                if line.startswith(f"{program} ")
            ]
        found += re.findall(rf"`({program} [a-z][^`]*)`", " ".join(text.split()))
    return list(dict.fromkeys(found))


def of_scripts(folder: Path) -> list[str]:
    """Return the commands that tpu-vm.sh prints with --dry-run, for each shape of machines."""
    for path, content in launch_scripts().items():
        (folder / "runtime" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "runtime" / path).write_bytes(content)
    found = []
    for shape, sets in SHAPES.items():
        (folder / shape).mkdir()
        script = folder / "sample" / "launch" / "tpu-vm.sh"
        script.parent.mkdir(parents=True, exist_ok=True)
        files = emit_launch(program_of(folder / shape, [*BASE, *sets]))
        if "launch/tpu-vm.sh" not in files or shape == "long-name":
            continue
        script.write_text(files["launch/tpu-vm.sh"])
        for words in COMMANDS:
            ran = subprocess.run(
                ["bash", str(script), "--dry-run", *words],
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "ZONE": "us-east5-a"},
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
            found += [line for line in ran.stdout.splitlines() if line.startswith("gcloud ")]
    return list(dict.fromkeys(found))


def refused(commands: list[str], folder: Path) -> dict[str, str]:
    """Return the commands that gcloud cannot parse, with its messages."""
    file = folder / "commands.json"
    file.write_text(json.dumps([{"command_string": command} for command in commands]))
    done = subprocess.run(
        ["gcloud", "meta", "lint-gcloud-commands", f"--commands-file={file}"],
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)
    assert len(read) == len(commands)
    return {one["command_string"]: one["error_message"] for one in read if not one["success"]}


@with_program("gcloud")
def test_gcloud_parses_all_commands_of_docs_and_scripts(tmp_path: Path) -> None:
    pages, scripts = of_pages("gcloud"), of_scripts(tmp_path)
    assert len(pages) >= 14 and len(scripts) >= 40
    assert refused([*pages, *scripts], tmp_path) == {}
    assert "--zonne" in refused(["gcloud compute tpus tpu-vm list --zonne=-"], tmp_path).popitem()[1]


@with_program("kubectl")
def test_kubectl_parses_all_commands_of_the_docs(tmp_path: Path) -> None:
    def said(command: str) -> str:
        words = [*shlex.split(command.partition(" | ")[0]), "--server=http://127.0.0.1:9"]
        return subprocess.run(words, input="", capture_output=True, text=True, timeout=60).stderr

    commands = of_pages("kubectl")
    assert len(commands) >= 3
    for command in commands:
        assert "unknown" not in (answer := said(command)) and answer, command
    assert "unknown flag" in said("kubectl get jobsets --selektor=a=b")
