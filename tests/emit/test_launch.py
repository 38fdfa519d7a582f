"""Tests of launch/: a recipe's files are valid in their languages, and for their tools."""

from __future__ import annotations

import copy
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from clouds import launch_scripts
from emitting import program_of, tool
from kubernetes_validate import ValidationError, validate
from launch_shapes import BASE, LONG, SHAPES
from packaging.requirements import Requirement
from ruamel.yaml import YAML

from recipec.compiler.emitters.launch import JOBSET_NAME, XPK, emit_launch
from recipec.compiler.emitters.readme import emit_readme
from recipec.compiler.lower import lower
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.load import load

FILES = {
    "one-host": {"tpu-vm.sh", "jobset.yaml", "skypilot.yaml", "xpk.sh"},
    "four-hosts": {"tpu-vm.sh", "jobset.yaml", "skypilot.yaml", "xpk.sh"},
    "eight-chips": {"tpu-vm.sh", "jobset.yaml", "skypilot.yaml"},
    "pairs": {"jobset.yaml", "xpk.sh"},
    "slices": {"tpu-vm.sh", "skypilot.yaml"},
    "slices-of-pairs": {"jobset.yaml", "xpk.sh"},
    "slices-of-four": {"tpu-vm.sh", "jobset.yaml", "xpk.sh"},
    "ironwood": {"jobset.yaml", "xpk.sh"},
    "v4": {"tpu-vm.sh", "jobset.yaml", "skypilot.yaml", "xpk.sh"},
    "local": {"tpu-vm.sh"},
    "full": {"tpu-vm.sh", "jobset.yaml", "skypilot.yaml", "xpk.sh"},
    "long-name": {"tpu-vm.sh", "jobset.yaml", "skypilot.yaml", "xpk.sh"},
    "everything": {"tpu-vm.sh", "jobset.yaml", "skypilot.yaml"},
    "reserved": {"tpu-vm.sh", "jobset.yaml", "skypilot.yaml", "xpk.sh"},
}
CPU = "mesh={accelerator: cpu-8, axes: {fsdp: 8}}"

SCRIPTS = {"slices", "slices-of-four", "ironwood", "local", "everything", "reserved"}
"""Shapes whose scripts together have every line of the templates."""


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Return the files of launch/ by name, and README.md, for each shape's recipe."""
    found = {}
    for shape, sets in SHAPES.items():
        program = program_of(tmp_path_factory.mktemp(shape), [*BASE, *sets])
        files = {path.removeprefix("launch/"): text for path, text in emit_launch(program).items()}
        found[shape] = files | {"README.md": emit_readme(program)}
    return found


def jobset_of(text: str) -> dict[str, Any]:
    account, jobset = YAML(typ="safe").load_all(text)
    assert account["kind"] == "ServiceAccount" and jobset["kind"] == "JobSet"
    return dict(jobset)


def pod_of(jobset: dict[str, Any]) -> dict[str, Any]:
    (slices,) = jobset["spec"]["replicatedJobs"]
    return dict(slices["template"]["spec"]["template"]["spec"])


def test_recipe_gets_the_launch_files_that_fit_its_mesh(launches: dict[str, dict[str, str]]) -> None:
    for shape, files in FILES.items():
        assert set(launches[shape]) == files | {"host.sh", "README.md"}, shape


def test_cpu_recipe_gets_no_launch_files(tmp_path: Path) -> None:
    assert emit_launch(program_of(tmp_path, [*BASE, CPU, "train.global_batch_size=8"])) == {}


def test_scripts_pass_shellcheck(launches: dict[str, dict[str, str]], tmp_path: Path) -> None:
    scripts, readmes = [], []
    for shape, files in launches.items():
        for name, text in files.items():
            assert "\n\n\n" not in text and text.endswith("\n") and not text.endswith("\n\n"), (shape, name)
            assert not re.search(r"[ \t]+$", text, re.MULTILINE), (shape, name)
            if name.endswith(".sh") and shape in SCRIPTS:
                (tmp_path / f"{shape}-{name}").write_text(text)
                scripts.append(tmp_path / f"{shape}-{name}")
        blocks = re.findall(r"^```sh\n(.*?)^```$", files["README.md"], re.MULTILINE | re.DOTALL)
        readmes += blocks
    (tmp_path / "readme.sh").write_text("set -e\n" + "\n".join(dict.fromkeys(readmes)))
    assert tool("shellcheck", "--severity=style", "--shell=bash", *scripts, tmp_path / "readme.sh") == ""


def probing(jobset: str) -> str:
    """Change a jobset.yaml for a probe with the command in its comment."""
    command = re.search(r"^# +sed '(.*)' jobset.yaml \|$", jobset, re.MULTILINE)
    assert command is not None
    done = subprocess.run(["sed", command[1]], input=jobset, capture_output=True, text=True, check=True)
    return done.stdout


def test_a_jobset_probes_without_weights_and_deletes_itself(launches: dict[str, dict[str, str]]) -> None:
    for shape, files in launches.items():
        if "jobset.yaml" in files:
            trains, probes = jobset_of(files["jobset.yaml"]), jobset_of(probing(files["jobset.yaml"]))
            assert probes["spec"].pop("ttlSecondsAfterFinished") == 3600, shape
            containers = [pod["containers"] + pod["initContainers"] for pod in map(pod_of, (trains, probes))]
            for before, after in zip(*containers, strict=True):
                if before["name"] in ("train", "prepare"):
                    steps = {"train": ["probe"], "prepare": ["setup"]}[before["name"]]
                    assert after.pop("command") == [*before.pop("command")[:2], *steps]
            assert probes == trains  # the rest is equal


def test_jobsets_are_valid_for_jobset_and_kubernetes_schemas(launches: dict[str, dict[str, str]]) -> None:
    """Validate against JobSet's fields, and each Job and pod against Kubernetes' own schema."""
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

    for shape, files in launches.items():
        if "jobset.yaml" not in files:
            continue
        jobset = jobset_of(probing(files["jobset.yaml"]))  # with all objects of the training, and more
        read = JobsetV1alpha2JobSet.from_dict(copy.deepcopy(jobset))
        assert read is not None and without_none(read.to_dict()) == jobset, shape
        (slices,) = jobset["spec"]["replicatedJobs"]
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
        validate(job | {"spec": slices["template"]["spec"]}, "1.34", strict=True)
        # JobSet allows no more. Neither name may become a label of more than 63 characters.
        assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
        assert len(f"{jobset['metadata']['name']}-slice-99-999-abcde") <= 63
    broken = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": {"templates": {}}}
    with pytest.raises(ValidationError):
        validate(broken, "1.34", strict=True)


def without_none(value: Any) -> Any:
    """Remove a tree's null keys, which were not given."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("shape", "slices", "hosts", "chips"),
    [
        ("one-host", 1, 1, 4),
        ("eight-chips", 1, 1, 8),
        ("pairs", 1, 2, 4),
        ("slices-of-pairs", 2, 2, 4),
        ("ironwood", 1, 2, 4),
    ],
)
def test_jobset_has_one_pod_for_each_host_of_each_slice(
    shape: str, slices: int, hosts: int, chips: int, launches: dict[str, dict[str, str]]
) -> None:
    jobset = jobset_of(launches[shape]["jobset.yaml"])
    (job,) = jobset["spec"]["replicatedJobs"]
    spec, pod = job["template"]["spec"], pod_of(jobset)
    assert (job["replicas"], spec["parallelism"], spec["completions"]) == (slices, hosts, hosts)
    (train,) = pod["containers"]
    assert train["resources"]["limits"] == train["resources"]["requests"] == {"google.com/tpu": chips}
    count = pod["nodeSelector"].get("cloud.google.com/gke-accelerator-count")
    assert count == (str(chips) if shape in ("eight-chips", "pairs", "slices-of-pairs") else None)
    assert pod.get("hostNetwork", False) == (slices > 1)
    exclusive = jobset["metadata"].get("annotations", {})
    assert bool(exclusive) == (hosts > 1)


def test_jobset_fails_on_exit_codes_1_and_2_and_restarts_otherwise(
    launches: dict[str, dict[str, str]],
) -> None:
    jobset = jobset_of(launches["everything"]["jobset.yaml"])
    (job,) = jobset["spec"]["replicatedJobs"]
    spec, pod = job["template"]["spec"], pod_of(jobset)
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 3 and spec["backoffLimit"] == 0
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {"containerName": "train", "operator": "In", "values": [1, 2]}
    (fails,) = jobset["spec"]["failurePolicy"]["rules"]
    assert (fails["action"], fails["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] >= 240
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    (train,) = pod["containers"]
    assert train["image"] == "registry.example.com/train:1"
    secrets = [env for env in train["env"] if "secretKeyRef" in env.get("valueFrom", {})]
    optional = {env["name"]: env["valueFrom"]["secretKeyRef"]["optional"] for env in secrets}
    assert optional == {"HF_TOKEN": True, "WANDB_API_KEY": True}
    assert "gs://others/artifacts/sample.tar.gz" in pod["initContainers"][0]["command"][2]
    assert "gs://my-bucket and gs://others" in launches["everything"]["jobset.yaml"]


def laid_out(files: dict[str, str], folder: Path) -> Path:
    """Write launch/ of an artifact, with the runtime's launch/ next to it."""
    for path, content in launch_scripts().items():
        (folder / "runtime" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "runtime" / path).write_bytes(content)
    for name, text in files.items():
        (folder / "sample/launch" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "sample/launch" / name).write_text(text)
    for name in ("recipe.lock.json", "requirements-train.txt"):
        (folder / "sample" / name).write_text("{}\n")
    (folder / "bin").mkdir()
    (folder / "bin/gcloud").write_text('#!/bin/sh\n[ "$1" = config ] && echo ada@example.com\n')
    (folder / "bin/gcloud").chmod(0o755)
    return folder


def create_command(folder: Path) -> list[str]:
    """Return the words that tpu-vm.sh would create the machines with."""
    ran = run_script(folder / "sample/launch/tpu-vm.sh", "--dry-run", "up")
    assert ran.returncode == 0, ran.stderr
    return shlex.split(ran.stdout)


def test_launch_settings_reach_the_launch_commands(
    launches: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    vm = create_command(laid_out(launches["everything"], tmp_path / "everything"))
    assert vm[:6] == ["gcloud", "compute", "tpus", "queued-resources", "create", "sample-ada"]
    assert {"--zone=us-east5-a", "--project=a-project"} <= {*vm} and "--node-id=sample-ada" in vm
    for flag in (
        *("--spot", "--network=net", "--subnetwork=sub", "--service-account=a@b.iam.gserviceaccount.com"),
        *("--valid-until-duration=12h", "--runtime-version=v2-alpha-x", "--accelerator-type=v5litepod-8"),
    ):
        assert flag in vm
    folder = laid_out(launches["everything"], tmp_path / "told")
    assert "HF_TOKEN WANDB_API_KEY" in run_script(folder / "sample/launch/tpu-vm.sh", "--help").stdout
    assert "--revision=main" in launches["everything"]["host.sh"]
    reserved = launches["reserved"]
    vm = create_command(laid_out(reserved, tmp_path / "reserved"))
    assert vm[:6] == ["gcloud", "alpha", "compute", "tpus", "tpu-vm", "create"]
    assert {"--reservation=mine", "--zone=a'b $c", "--version=v2-alpha-tpuv5"} <= {*vm}
    assert "--reservation=mine" in reserved["xpk.sh"]
    selector = pod_of(jobset_of(reserved["jobset.yaml"]))["nodeSelector"]
    assert selector["cloud.google.com/reservation-name"] == "mine"
    assert "--tpu-type=tpu7x-2x2x2" in launches["ironwood"]["xpk.sh"]
    assert len(jobset_of(launches["long-name"]["jobset.yaml"])["metadata"]["name"]) <= JOBSET_NAME
    long_names = laid_out(launches["long-name"], tmp_path / "long-name") / "sample/launch"
    for script, longest in (("tpu-vm.sh", 60), ("xpk.sh", 40)):
        name = run_script(long_names / script, "name").stdout.strip()
        assert name.startswith(LONG[:35]) and name.endswith("-ada") and len(name) <= longest


def test_host_script_uv_version_satisfies_pyproject(root: Path) -> None:
    import tomllib

    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (requirement,) = (r for r in map(Requirement, project["optional-dependencies"]["dev"]) if r.name == "uv")
    (used,) = re.findall(r"^uv=(.*)$", launch_scripts()["launch/host.sh"].decode(), re.MULTILINE)
    assert requirement.specifier.contains(used)


def run_script(script: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a script of launch/ in the folder above its artifact, with that folder's bin/ on PATH."""
    place = script.parents[2]
    environment = {"PATH": f"{place / 'bin'}:/usr/bin:/bin", "HOME": str(place), **environ}
    command = ["bash", str(script), *arguments]
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=60)


def test_skypilot_job_passes_slice_id_and_coordinator_address(
    launches: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    task = YAML(typ="safe").load(launches["slices"]["skypilot.yaml"])
    assert task["num_nodes"] == 2 and task["resources"]["accelerators"] == "tpu-v5litepod-8"
    folder = tmp_path / "sample" / "launch"
    folder.mkdir(parents=True)
    (folder / "run.sh").write_text(task["run"])
    (folder / "host.sh").write_text(
        'echo "$1 $MEGASCALE_NUM_SLICES $MEGASCALE_SLICE_ID $MEGASCALE_COORDINATOR_ADDRESS"'
    )
    places = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.9"}
    ran = run_script(folder / "run.sh", **places, **task["envs"])
    assert ran.stdout == "train 2 1 10.0.0.7\n", ran.stderr
    assert run_script(folder / "run.sh", **places, STEP="probe").stdout == "probe 2 1 10.0.0.7\n"
    (folder / "setup.sh").write_text(task["setup"].replace("tar xzf", ": "))
    for step, hosts in (("probe", "setup   \n"), ("train", "setup   \nstage   \n")):
        assert run_script(folder / "setup.sh", STEP=step).stdout == hosts
    single = YAML(typ="safe").load(launches["everything"]["skypilot.yaml"])
    assert "num_nodes" not in single and "MEGASCALE" not in single["run"]
    assert single["resources"]["infra"] == "gcp/us-east5/us-east5-a"
    assert single["resources"]["use_spot"] and single["resources"]["accelerator_args"]["gcp_queued_resource"]


def test_xpk_script_passes_the_archive_and_deletes_only_by_name(
    launches: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    script = laid_out(launches["slices-of-pairs"], tmp_path) / "sample/launch/xpk.sh"
    xpk = tmp_path / "bin" / "xpk"
    xpk.write_text(
        '#!/bin/bash\nprintf "%s\\n" "$@"\nfor word; do case "$word" in --script-dir=*) ls "${word#*=}" ;; '
        '--env-file=*) cat "${word#*=}" ;; esac; done\n'
    )
    xpk.chmod(0o755)
    places = {"CLUSTER": "c", "ZONE": "z", "HF_TOKEN": "a-secret", "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    assert "recipe pack sample" in run_script(script, "create", **places).stderr
    (tmp_path / "train.py").touch()
    subprocess.run(["tar", "czf", "sample.tar.gz", "train.py"], cwd=tmp_path, check=True)
    words = run_script(script, "--dry-run", "create", **places).stdout.splitlines()
    assert {"--dry-run", "--workload=sample-ada", "--cluster=c", "--zone=z", "--num-slices=2"} <= set(words)
    assert {"train.py", "HF_TOKEN", "--tpu-type=v5litepod-2x4"} <= set(words) and "a-secret" not in words
    assert not list((tmp_path / "tmp").iterdir())
    for dry in (
        ["create", "--dry-run"],
        ["--dry-run", "delete", "sample-ada"],
        ["delete", "--dry-run", "sample-ada"],
    ):
        words = run_script(script, *dry, **places).stdout.splitlines()
        assert "--dry-run" in words and "--no-dry-run" not in words
    for wrong in (
        *(
            ["delete"],
            ["delete", "simple"],
            ["delete", "sample-ada", "now"],
            ["delete", "sample-ada", "--dry"],
        ),
        *(["create", "dry-run"], ["--now", "create"], ["fly"], []),
    ):
        ran = run_script(script, *wrong, **places)
        assert ran.returncode == 1 and ran.stderr.startswith("error: ") and not ran.stdout
    deleted = run_script(script, "delete", "sample-ada", **places).stdout
    assert "--workload=sample-ada" in deleted and "--no-dry-run" in deleted
    words = run_script(script, "create", WORKLOAD="mine", **places).stdout.splitlines()
    assert "--workload=mine" in words
    assert "unset WORKLOAD" in run_script(script, "create", WORKLOAD="Mine", **places).stderr
    assert "no cluster is named" in run_script(script, "create", ZONE="z").stderr
    assert "create" in run_script(script, "--help").stdout
    xpk.unlink()
    assert f"pip install xpk=={XPK}" in run_script(script, "create", **places).stderr
    assert f"xpk=={XPK}" in launches["slices-of-pairs"]["README.md"]


def findings(folder: Path, *sets: str) -> list[Diagnostic]:
    program_of(folder, BASE)  # writes the recipe
    found = lower(load(folder / "recipe.yaml", [*BASE, *sets])).diagnostics
    return [d for d in found if d.code[1:3] == "13"]


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (["launch.spot=true", "checkpoint.directory=out"], [("W1303", "checkpoint.directory")]),
        (["launch.kind=[xpk]", *SHAPES["eight-chips"]], [("E1302", "launch.kind[0]")]),
        (["launch.kind=[skypilot]", *SHAPES["slices-of-four"]], [("E1302", "launch.kind[0]")]),
        (["launch.kind=[tpu-vm]", *SHAPES["pairs"]], [("E1302", "launch.kind[0]")]),
        (["launch.kind=[gke, tpu-vm]", *SHAPES["ironwood"]], [("E1302", "launch.kind[1]")]),
        (["launch.kind=[gke]", "checkpoint.directory=out"], [("E1302", "launch.kind[0]")]),
        (["launch={kind: [gke], queue_for: 1h}"], [("N1305", "launch.queue_for")]),
        (["launch={kind: [gke], network: n}"], [("N1305", "launch.network")]),
        (["launch={queue_for: 1h, queued: true}"], []),
        ([CPU, "launch={kind: [gke], zone: z}"], [("E1302", "launch.kind[0]")]),
        ([CPU, "launch={zone: z, image: i}"], [("N1305", "launch.zone"), ("N1305", "launch.image")]),
        (["launch={zone: z, spot: true, max_restarts: 0}"], []),
    ],
)
def test_launch_problems_are_diagnosed_at_their_keys(
    sets: list[str], expected: list[tuple[str, str]], tmp_path: Path
) -> None:
    found = findings(tmp_path, *sets)
    assert [(d.code, d.path) for d in found] == expected
    assert all(d.help for d in found if d.code[0] != "N")
