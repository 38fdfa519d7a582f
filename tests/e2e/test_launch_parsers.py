"""Tests of launch/skypilot.yaml with SkyPilot's parser, and of launch/xpk.sh with xpk's.

The tests install both in build/ if they are missing: 0.5 and 0.2 GB, a few seconds.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from recipec.compiler.emitters.launch import XPK, emit_launch
from recipec.compiler.lowering.launching import machines
from recipec.compiler.lowering.program import Program
from tests.emit.emitting import program_of
from tests.emit.launch_shapes import BASE, SHAPES

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.nightly

SKYPILOT = """
import json, sys
import sky
found = {}
for path in sys.argv[1:]:
    task = sky.Task.from_yaml(path)
    (resources,) = task.resources
    found[path] = {
        "name": task.name, "nodes": task.num_nodes, "accelerators": resources.accelerators,
        "arguments": resources.accelerator_args, "spot": resources.use_spot, "zone": resources.zone,
        "cloud": str(resources.cloud), "recovery": resources.job_recovery, "mounts": task.file_mounts,
        "secrets": sorted(task.secrets),
    }
print(json.dumps(found))
"""

XPK_SCRIPT = """
import argparse, json, sys
from xpk.core.system_characteristics import get_system_characteristics
from xpk.parser.core import set_parser
found = []
for words in json.load(sys.stdin):
    parser = argparse.ArgumentParser()
    set_parser(parser)
    given = parser.parse_args(words)
    made, status = get_system_characteristics(given)
    assert status == 0
    found.append({"given": {k: v for k, v in vars(given).items() if k != "func"}, "topology": made.topology,
                  "hosts": made.vms_per_slice, "chips": made.chips_per_vm, "node": made.gke_accelerator,
                  "machine": made.gce_machine_type})
print(json.dumps(found))
"""


def environment(package: str) -> Path:
    """Return the Python of an environment with a pinned package."""
    folder = ROOT / "build" / package.replace("==", "-").replace("[gcp]", "")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "installed").exists():
            shutil.rmtree(folder, ignore_errors=True)
            uv = [sys.executable, "-m", "uv"]
            subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
            install = [*uv, "pip", "install", "--quiet", "--python", str(folder / "bin/python"), package]
            done = subprocess.run(install, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            (folder / "installed").touch()
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Program]:
    return {
        shape: program_of(tmp_path_factory.mktemp(shape), [*BASE, *sets]) for shape, sets in SHAPES.items()
    }


def asked(python: Path, script: str, *arguments: str, folder: Path, given: str = "") -> Any:
    """Run a script and return its last line, parsed as JSON."""
    done = subprocess.run(
        [str(python), "-c", script, *arguments],
        cwd=folder,
        env={"HOME": str(folder), "PATH": "/usr/bin:/bin", "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
        input=given,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_skypilot_parses_the_emitted_tasks(programs: dict[str, Program], tmp_path: Path) -> None:
    for shape, program in programs.items():
        text = emit_launch(program).get("launch/skypilot.yaml")
        if text is not None:
            (tmp_path / f"{shape}.yaml").write_text(text)
            (tmp_path / f"{program.name}.tar.gz").touch()
    paths = sorted(path.name for path in tmp_path.glob("*.yaml"))
    assert len(paths) >= 7
    found = asked(environment("skypilot[gcp]==0.14.1"), SKYPILOT, *paths, folder=tmp_path)
    for path in paths:
        program, task = programs[path.removesuffix(".yaml")], found[path]
        accelerator, launch = program.accelerator, program.recipe.launch
        name = accelerator.name.replace("v5e-", "v5litepod-")
        assert task["accelerators"] == {f"tpu-{name}": 1} and task["cloud"] == "GCP"
        assert task["nodes"] == accelerator.slices
        version = launch.runtime_version or accelerator.runtime_version
        queued = {"gcp_queued_resource": True} if launch.queued else {}
        assert task["arguments"] == {"runtime_version": version, **queued}
        # Without a real zone, SkyPilot chooses one.
        zone = launch.zone if launch.zone and "-" in launch.zone else None
        assert (task["spot"], task["zone"]) == (launch.spot, zone)
        assert task["recovery"]["recover_on_exit_codes"] == [75, 137, 143]
        assert task["mounts"] == {f"~/{program.name}.tar.gz": f"./{program.name}.tar.gz"}
        assert "HF_TOKEN" in task["secrets"]
    # The parser refuses a wrong file.
    broken = YAML(typ="safe").load((tmp_path / paths[0]).read_text())
    broken["resources"]["accelerator"] = broken["resources"].pop("accelerators")
    with (tmp_path / "broken.yaml").open("w") as file:
        YAML(typ="safe").dump(broken, file)
    with pytest.raises(AssertionError, match="accelerator"):
        asked(environment("skypilot[gcp]==0.14.1"), SKYPILOT, "broken.yaml", folder=tmp_path)


def test_xpk_parses_the_emitted_commands(programs: dict[str, Program], tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    record = tmp_path / "bin" / "xpk"
    record.write_text('#!/bin/bash\nprintf "%s\\0" "$@" >> "$WORDS"; printf "\\n" >> "$WORDS"\n')
    record.chmod(0o755)
    (tmp_path / "bin" / "gcloud").write_text("#!/bin/bash\necho ada@example.com\n")
    (tmp_path / "bin" / "gcloud").chmod(0o755)
    shutil.copytree(ROOT / "runtime" / "launch", tmp_path / "runtime" / "launch")
    (tmp_path / "runtime" / "__init__.py").touch()
    commands, shapes = [], []
    for shape, program in programs.items():
        text = emit_launch(program).get("launch/xpk.sh")
        if text is None:
            continue
        script = tmp_path / "sample" / "launch" / "xpk.sh"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(text)
        for empty in ("empty", "sample/requirements-train.txt"):
            (tmp_path / empty).touch()
        subprocess.run(["tar", "czf", f"{program.name}.tar.gz", "empty"], cwd=tmp_path, check=True)
        words = tmp_path / "words"
        words.unlink(missing_ok=True)
        for arguments in (["create"], ["create", "--dry-run"], ["delete", "sample-ada"]):
            subprocess.run(
                ["bash", str(script), *arguments],
                cwd=tmp_path,
                env={
                    "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
                    "CLUSTER": "c",
                    "ZONE": "z",
                    "WORDS": str(words),
                    "WORKLOAD": "sample-ada",
                },
                check=True,
            )
        (create, dry, delete) = (line.split("\0")[:-1] for line in words.read_text().splitlines())
        # The script has removed its folder.
        commands += [[w if "--script-dir" not in w else f"--script-dir={tmp_path}" for w in create]]
        shapes.append(shape)
        assert "--dry-run" in dry and "--no-dry-run" in create and "--no-dry-run" in delete
    assert len(shapes) >= 7
    found = asked(environment(f"xpk=={XPK}"), XPK_SCRIPT, folder=tmp_path, given=json.dumps(commands))
    for shape, answer in zip(shapes, found, strict=True):
        program = programs[shape]
        made, given = machines(program.accelerator), answer["given"]
        assert answer["topology"] == program.accelerator.topology, shape
        assert (answer["hosts"], answer["chips"]) == (made.hosts_per_slice, made.chips_per_host), shape
        assert answer["node"] == program.accelerator.gke_accelerator and answer["machine"] == made.gke_machine
        assert given["num_slices"] == made.slices and given["max_restarts"] == "20"
        assert (
            given["restart_on_exit_codes"] == "75"
            and given["reservation"] == program.recipe.launch.reservation
        )
