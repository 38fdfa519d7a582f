"""Tests that run launch/tpu-vm.sh and host.sh against a fake cloud in a folder."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from clouds import Cloud, Started
from emitting import program_of

from recipec.compiler.emitters.emit import emit
from tests.waiting import until

NAME = "sample"
VM = "sample-ada"
HOSTS = 2
TWO_HOSTS = [
    "serve=null",
    "model.id=meta-llama/Llama-3.2-1B-Instruct",
    "mesh={accelerator: v5p-16, axes: {fsdp: 8, tp: 1}}",
    "train.global_batch_size=16",
    "checkpoint.directory=gs://my-bucket/sample",
]
KINDS = {
    "two": TWO_HOSTS,
    "spot": [*TWO_HOSTS, "launch.spot=true"],
    "named": [*TWO_HOSTS, "merge.output=merged.v1"],
    "slices": [*TWO_HOSTS, "mesh={accelerator: v5e-8, axes: {dcn: 2, fsdp: 8, tp: 1}}"],
}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Mapping[str, bytes]]:
    """Make artifacts with only the files that a launch needs."""
    found = {}
    for kind, sets in KINDS.items():
        files = emit(program_of(tmp_path_factory.mktemp(kind), sets))
        wanted = ("launch/host.sh", "launch/tpu-vm.sh", "recipe.lock.json", "requirements-train.txt")
        found[kind] = {path: files[path] for path in wanted}
    return found


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory, artifacts: dict[str, Mapping[str, bytes]]) -> Path:
    """Make a cloud whose hosts are prepared for training."""
    cloud = Cloud(tmp_path_factory.mktemp("ready"), artifacts["two"], NAME, HOSTS)
    prepare(cloud)
    return cloud.folder


@pytest.fixture
def clouds(
    tmp_path: Path, artifacts: dict[str, Mapping[str, bytes]], ready: Path
) -> Iterator[Callable[..., Cloud]]:
    made: list[Cloud] = []

    def make(kind: str = "two", hosts: int = HOSTS, prepared: bool = False) -> Cloud:
        folder = tmp_path / f"cloud-{len(made)}"
        folder.mkdir()
        made.append(Cloud(folder, artifacts[kind], NAME, hosts))
        if prepared:
            shutil.copytree(ready, folder, dirs_exist_ok=True)
        return made[-1]

    yield make
    for cloud in made:
        cloud.close()


def tools(folder: Path) -> str:
    """Make a PATH with the tools of a machine without gcloud."""
    (folder / "tools").mkdir()
    for name in ("bash", "cat", "dirname", "sed"):
        (folder / "tools" / name).symlink_to(shutil.which(name) or "")
    (folder / "tools/python3").symlink_to(sys.executable)
    return str(folder / "tools")


def prepare(cloud: Cloud, *commands: str, **environ: str) -> None:
    for command in commands or ("up", "push", "setup", "stage"):
        ran = cloud.run(command, **environ)
        assert ran.status == 0, ran.err


def start_training(cloud: Cloud, *command: str, then: Sequence[str] = ()) -> Started:
    """Start a command, and wait until all hosts train. The trainings wait for the file `go`."""
    for host in range(HOSTS):
        cloud.plan(f"sample-ada-{host}", "wait", *then)
    process = cloud.start(*command)
    until(lambda: len(cloud.lines("trainings")) == HOSTS)
    return process


def test_launch_on_two_hosts_repeats_no_finished_step(clouds: Callable[..., Cloud]) -> None:
    cloud = clouds()
    prepare(cloud)
    prepare(cloud)
    assert len(cloud.calls("tpu-vm create")) == 1
    (create,) = cloud.calls("tpu-vm create")
    words = create.split()[4:]
    assert words[:3] == [VM, "--accelerator-type=v5p-16", "--version=v2-alpha-tpuv5"] and len(words) == 5
    # Each host, once.
    assert sum("-m uv venv" in line for line in cloud.lines("python3")) == HOSTS
    assert sorted(line.split()[0] for line in cloud.lines("hf")) == [f"sample-ada-{i}" for i in range(HOSTS)]
    ran = cloud.run("train")
    assert ran.status == 0 and "The training is done." in ran.err
    assert sorted(cloud.lines("trainings")) == [
        f"sample-ada-{i} sample/train.py --model weights --resume" for i in range(HOSTS)
    ]
    assert cloud.run("status").out.count("ended 0") == HOSTS
    assert cloud.run("merge").status == 0
    merges = [line for line in cloud.lines("trainings") if "merge.py" in line]
    assert merges == ["sample-ada-0 sample/merge.py --model weights"]
    assert cloud.run("fetch").status == 0
    logs = cloud.laptop / "results" / NAME / "logs"
    assert "step 1 on sample-ada-1" in (logs / "host-1.log").read_text()
    assert (logs / "process-1.log").read_text() == "process of sample-ada-1\n"


def test_probe_fetches_its_file_and_deletes_the_machine(clouds: Callable[..., Cloud]) -> None:
    cloud = clouds()
    assert cloud.run("probe").status == 1 and not cloud.calls("create")
    ran = cloud.run("probe", VM)
    assert ran.status == 0
    assert ran.out.count("-----BEGIN probe.json-----\n{}\n-----END probe.json-----\n") == HOSTS
    assert (cloud.laptop / "results" / NAME / "probe.json").read_text() == "{}\n"
    assert len(cloud.lines("trainings")) == HOSTS and not cloud.lines("hf")
    assert len(cloud.calls("delete")) == 1 and cloud.run("status").out == f"{VM}: absent\n"
    assert f"{VM} does not exist" in cloud.run("down", VM).err
    # A number outside its tolerance, and a host where nothing can be installed.
    cloud.plan("sample-ada-1", 1)
    assert cloud.run("probe", VM).status == 1
    (cloud.folder / "fault-1").write_text("x\n" * 9)
    assert cloud.run("probe", VM).status == 1
    assert len(cloud.calls("delete")) == 3 and cloud.run("status").out == f"{VM}: absent\n"


def test_interrupted_training_restarts_but_failed_training_does_not(clouds: Callable[..., Cloud]) -> None:
    cloud = clouds(prepared=True)
    for host, statuses in enumerate([(75, 137, 0), (143, 75, 0)]):
        cloud.plan(f"sample-ada-{host}", *statuses)
    ran = cloud.run("train")
    assert ran.status == 0, ran.err
    assert len(cloud.lines("trainings")) == 3 * HOSTS
    assert ran.err.count("starting it again") == 2
    cloud.plan("sample-ada-1", 1)
    ran = cloud.run("train")
    assert ran.status == 1 and "error: the training ended with an error" in ran.err
    assert len(cloud.lines("trainings")) == 4 * HOSTS
    script = cloud.laptop / "generated/sample/launch/tpu-vm.sh"
    script.write_text(script.read_text().replace("--max-restarts=20", "--max-restarts=1"))
    cloud.plan("sample-ada-0", *[137] * 9)
    ran = cloud.run("train")
    assert ran.status == 1 and "interrupted 1 time" in ran.err
    assert len([line for line in cloud.lines("trainings") if line.startswith("sample-ada-0")]) == 4 + 2


def test_train_on_host_without_environment_fails_without_restarts(clouds: Callable[..., Cloud]) -> None:
    cloud = clouds(hosts=1)
    assert cloud.run("status").out == f"{VM}: absent\n"
    prepare(cloud, "up", "push")
    ran = cloud.run("train")
    assert ran.status == 1 and "error: there is no environment in venv/ yet" in ran.err
    assert "sample/launch/host.sh setup stage" in ran.err and not cloud.lines("trainings")
    assert "not started" in cloud.run("status").out


def test_up_waits_for_the_queued_resource(clouds: Callable[..., Cloud]) -> None:
    cloud = clouds()
    ran = cloud.run("--queue", "up")
    assert ran.status == 0, ran.err
    assert "sample-ada: WAITING_FOR_RESOURCES" in ran.err and "sample-ada: PROVISIONING" in ran.err
    (create,) = cloud.calls("queued-resources create")
    assert "--node-id=sample-ada" in create and "--runtime-version=v2-alpha-tpuv5" in create
    assert not cloud.calls("tpu-vm create")
    assert cloud.run("down", VM).status == 0
    (delete,) = cloud.calls("delete")
    assert delete == "compute tpus queued-resources delete sample-ada --force --quiet --zone=a-zone"


def test_run_recreates_preempted_spot_machine_and_resumes(clouds: Callable[..., Cloud]) -> None:
    cloud = clouds("spot")
    process = start_training(cloud, "run", VM, then=["0"])
    (cloud.folder / "full").touch()  # no capacity at the first try
    cloud.preempt()
    ran = process.ends()
    assert ran.status == 0, ran.err
    assert "sample-ada is PREEMPTED" in ran.err and "The training is done." in ran.err
    assert len(cloud.calls("tpu-vm create", "--spot")) == 3 and len(cloud.calls("tpu-vm delete")) == 1
    assert len(cloud.lines("trainings")) == 2 * HOSTS
    assert all(line.endswith("--resume") for line in cloud.lines("trainings"))


def test_run_without_machine_name_does_not_replace_preempted_machine(clouds: Callable[..., Cloud]) -> None:
    cloud = clouds("spot")
    process = start_training(cloud, "run")
    cloud.preempt()
    ran = process.ends()
    assert ran.status == 1
    assert "error: sample-ada is PREEMPTED" in ran.err and "run sample-ada replaces it" in ran.err
    assert not cloud.calls("delete")


def test_failed_host_is_retried(clouds: Callable[..., Cloud]) -> None:
    cloud = clouds(prepared=True)
    (cloud.folder / "fault-1").write_text("x\n")
    ran = cloud.run("setup")
    assert ran.status == 0 and "a host failed; trying again" in ran.err
    (cloud.folder / "fault-1").write_text("x\n" * 3)
    assert cloud.run("setup").status == 1
    # Watching waits for a host that does not answer.
    (cloud.folder / "fault-1").write_text("")
    cloud.plan("sample-ada-0", "wait")
    process = cloud.start("train")
    until(lambda: len(cloud.lines("trainings")) == HOSTS)
    (cloud.folder / "fault-1").write_text("x\n" * 2)
    (cloud.folder / "go").touch()
    ran = process.ends()
    assert ran.status == 0 and "not every host answers" in ran.err


def test_stage_refuses_weights_larger_than_free_disk(clouds: Callable[..., Cloud]) -> None:
    cloud = clouds()
    (cloud.folder / "free").write_text("100\n")
    prepare(cloud, "up", "push", "setup")
    ran = cloud.run("stage")
    assert ran.status == 1 and "the weights take 3 GiB" in ran.err and "in WEIGHTS" in ran.err
    assert not cloud.lines("hf")


def test_a_dry_run_shows_the_commands_and_runs_nothing(clouds: Callable[..., Cloud]) -> None:
    cloud = clouds()
    before = sorted(cloud.folder.rglob("*"))
    for command in (["up"], ["push"], ["run", VM], ["fetch"], ["stop"], ["merge"], ["down", VM]):
        ran = cloud.run("--dry-run", *command, HF_TOKEN="a-secret")
        assert ran.status == 0, ran.err
        assert ran.out.startswith(("gcloud compute tpus", "mkdir")) and "a-secret" not in ran.out
    assert "tpu-vm create sample-ada" in cloud.run("--dry-run", "run", VM).out
    assert sorted(cloud.folder.rglob("*")) == before


@pytest.mark.parametrize(
    "arguments", [["down"], ["down", "simple"], ["run", "simple"], ["fly"], ["--now", "up"]]
)
def test_wrong_command_or_machine_name_is_refused(arguments: list[str], clouds: Callable[..., Cloud]) -> None:
    cloud = clouds()
    ran = cloud.run(*arguments)
    assert ran.status == 1 and ran.err.startswith("error: ") and "= help: " in ran.err
    assert not cloud.lines("calls")


@pytest.mark.parametrize("command", [["down", VM], ["up"], ["status"]])
def test_gcloud_failure_is_not_read_as_absent_machine(
    command: list[str], clouds: Callable[..., Cloud]
) -> None:
    cloud = clouds()
    ran = cloud.run(*command, PATH=tools(cloud.folder))
    assert ran.status == 1 and ran.err.startswith("error: gcloud is not installed")
    (cloud.folder / "refusal").write_text("PERMISSION_DENIED: Location a-zone is not found\n")
    ran = cloud.run(*command)
    assert (
        ran.status == 1 and "error: gcloud cannot tell the state of sample-ada: PERMISSION_DENIED" in ran.err
    )
    assert not cloud.calls("create") and not cloud.calls("delete")


def test_run_follows_a_running_training(clouds: Callable[..., Cloud]) -> None:
    cloud = clouds(prepared=True)
    first = start_training(cloud, "train")
    until(lambda: cloud.calls("host.sh follow"))
    first.interrupt()
    first.ends()
    ran = cloud.run("push")
    assert ran.status == 1 and "error: a training runs on sample-ada" in ran.err
    assert "tpu-vm.sh train follows it" in ran.err and "stop ends it" in ran.err
    copies = len(cloud.calls("scp"))
    second = cloud.start("run")
    until(lambda: len(cloud.calls("host.sh follow")) > 1)
    (cloud.folder / "go").touch()
    ran = second.ends()
    assert ran.status == 0 and "A training runs on sample-ada: following it" in ran.err
    assert len(cloud.lines("trainings")) == HOSTS and len(cloud.calls("scp")) == copies


def test_fetch_excludes_checkpoints_and_merged_weights(clouds: Callable[..., Cloud]) -> None:
    cloud = clouds("named")
    prepare(cloud)
    assert cloud.run("train").status == 0
    assert cloud.run("fetch").status == 0
    (call,) = cloud.calls("storage rsync")
    (left_out,) = re.findall(r"--exclude=(\S+)", call)
    for path in ("metrics.jsonl", "run.json", "tensorboard/events.1", "merged.json"):
        assert not re.match(left_out, path), path
    for path in (
        *("7/model_params/d/1", "7.orbax-checkpoint-tmp-1/x", "corrupt-7/model_params/x"),
        *("merged.v1/model.safetensors", "merged.v1-adapter/adapter_config.json"),
    ):
        assert re.match(left_out, path), path


def test_stage_and_train_refuse_weights_of_another_model(clouds: Callable[..., Cloud]) -> None:
    cloud = clouds(prepared=True)
    assert len(cloud.lines("hf")) == HOSTS
    script = cloud.home(1) / "sample/launch/host.sh"
    script.write_text(script.read_text().replace("Llama-3.2-1B-Instruct", "Llama-3.2-1B"))
    for command in ("stage", "train"):
        ran = cloud.run(command)
        assert ran.status == 1 and "error: weights holds meta-llama/Llama-3.2-1B-Instruct" in ran.err
        assert "this run begins with meta-llama/Llama-3.2-1B" in ran.err
    assert len(cloud.lines("hf")) == HOSTS
    (cloud.home(0) / "weights/.origin").unlink()
    (cloud.home(0) / "weights/model.safetensors").touch()
    assert "error: weights holds files that stage did not write" in cloud.run("stage").err


def test_ctrl_c_leaves_training_running_and_stop_ends_with_a_save(clouds: Callable[..., Cloud]) -> None:
    cloud = clouds(prepared=True)
    process = start_training(cloud, "train")
    until(lambda: cloud.calls("host.sh follow"))
    time.sleep(0.2)
    process.interrupt()
    ran = process.ends()
    assert ran.status == 130 and "continues without this terminal" in ran.err
    assert cloud.run("status").out.count("running") == HOSTS
    watching = cloud.start("train")  # finds a running training, and starts none
    until(lambda: len(cloud.calls("host.sh follow")) > 1)
    assert cloud.run("stop").status == 0
    ran = watching.ends()
    assert ran.status == 0 and "The training was stopped" in ran.err
    assert len(cloud.lines("trainings")) == HOSTS
    for host in range(HOSTS):
        assert (cloud.home(host) / "train.status").read_text() == "143\n"
        assert "saved at a signal" in (cloud.home(host) / "train.log").read_text()


def test_secrets_are_stored_in_private_file_and_not_in_commands(clouds: Callable[..., Cloud]) -> None:
    cloud = clouds()
    secret = 'it\'s $a "secret"'
    prepare(cloud, HF_TOKEN=secret)
    assert not any("secret\\" in line or secret in line for line in cloud.lines("calls"))
    assert (cloud.home(1) / "secrets.env").stat().st_mode & 0o777 == 0o600
    assert all(line.endswith(f"token={secret}") for line in cloud.lines("hf"))


def test_pod_training_saves_on_sigterm(clouds: Callable[..., Cloud]) -> None:
    cloud = clouds(hosts=1)
    cloud.plan("pod", "wait")
    subprocess.run(["tar", "xzf", "sample.tar.gz"], cwd=cloud.laptop, check=True)
    command, environment = ["bash", "sample/launch/host.sh"], cloud.environment(HOST="pod")
    subprocess.run([*command, "setup", "stage"], cwd=cloud.laptop, env=environment, check=True)
    pod = subprocess.Popen([*command, "train"], cwd=cloud.laptop, env=environment, stdout=subprocess.PIPE)
    until(lambda: cloud.lines("trainings"))
    pod.terminate()
    out, _ = pod.communicate(timeout=60)
    assert pod.returncode == 143 and b"saved at a signal" in out


def test_slices_are_queued_in_one_request_and_train_together(clouds: Callable[..., Cloud]) -> None:
    cloud = clouds("slices", hosts=1)
    prepare(cloud)
    (create,) = cloud.calls("queued-resources create")
    assert "--node-count=2 --node-prefix=sample-ada" in create and "--accelerator-type=v5litepod-8" in create
    ran = cloud.run("train")
    assert ran.status == 0, ran.err
    assert sorted(line.split()[0] for line in cloud.lines("trainings")) == [
        "sample-ada-0-0",
        "sample-ada-1-0",
    ]
    assert cloud.run("fetch").status == 0
    logs = sorted(path.name for path in (cloud.laptop / "results/sample/logs").iterdir())
    assert logs == ["process-0.log", "sample-ada-0-0.log", "sample-ada-1-0.log"]
    assert cloud.run("down", VM).status == 0 and cloud.calls("queued-resources delete sample-ada")


@pytest.mark.parametrize("command", ["up", "push", "run", "probe", "train", "stop", "down", "status", "name"])
def test_dry_run_anywhere_changes_nothing(command: str, clouds: Callable[..., Cloud]) -> None:
    cloud = clouds(prepared=True)
    words = [command, *([VM] if command in ("run", "probe", "down") else [])]
    calls = cloud.lines("calls")
    answers = set()
    for place in range(len(words) + 1):
        ran = cloud.run(*words[:place], "--dry-run", *words[place:])
        assert ran.status == 0, ran.err
        answers.add(ran.out)
    assert len(answers) == 1 and cloud.lines("calls") == calls


@pytest.mark.parametrize(
    "words",
    [
        ["down", VM, "--dryrun"],
        ["down", VM, "-n"],
        ["down", VM, "now"],
        ["up", "dry-run"],
        ["up", VM],
        ["stop", VM],
        ["fetch", "adapter"],
        ["fetch", "merged", "adapter"],
        ["--queue=yes", "up"],
    ],
)
def test_unknown_words_are_refused_before_anything_is_done(
    words: list[str], clouds: Callable[..., Cloud]
) -> None:
    cloud = clouds(prepared=True)
    calls = cloud.lines("calls")
    ran = cloud.run(*words)
    assert ran.status == 1 and ran.err.startswith("error: ") and "= help: " in ran.err
    assert cloud.lines("calls") == calls
    assert "Usage: " in cloud.run("down", VM, "--help").out and cloud.lines("calls") == calls


def test_host_script_checks_all_steps_before_the_first(clouds: Callable[..., Cloud]) -> None:
    cloud = clouds(hosts=1)
    subprocess.run(["tar", "xzf", "sample.tar.gz"], cwd=cloud.laptop, check=True)
    for steps, status in ((["setup", "stag"], 1), (["setup", "--help"], 0)):
        command = ["bash", "sample/launch/host.sh", *steps]
        ran = subprocess.run(command, cwd=cloud.laptop, env=cloud.environment(HOST="pod"), check=False)
        assert ran.returncode == status and not cloud.lines("python3")


@pytest.mark.parametrize(
    "command", ["up", "push", "setup", "stage", "train", "stop", "merge", "run", "probe", "down"]
)
def test_a_vm_of_another_person_is_not_changed(command: str, clouds: Callable[..., Cloud]) -> None:
    """Both people have the same name before the @, and one also names the other's VM."""
    cloud = clouds(prepared=True)
    words = [command, *([VM] if command in ("run", "probe", "down") else [])]
    before = len(cloud.lines("calls"))
    for account in ("ada@example.org", "grace@example.com"):
        cloud.sign_in(account)
        ran = cloud.run(*words, VM=VM)
        assert ran.status == 1 and f"error: {VM} belongs to another person" in ran.err, ran.err
        assert "its label recipec_owner is ada-example-com-" in ran.err and "export VM=" in ran.err
    assert all(" describe " in call for call in cloud.lines("calls")[before:])
    assert cloud.run("status", VM=VM).out.startswith(f"{VM}: ready")


def test_two_people_train_on_two_machines(clouds: Callable[..., Cloud]) -> None:
    cloud = clouds()
    assert cloud.run("run").status == 0
    cloud.sign_in("Grace.Hopper@Example.com")
    assert cloud.run("name").out == "sample-grace-hopper\n"
    assert cloud.run("run").status == 0
    assert sorted(path.name for path in (cloud.folder / "vms").iterdir()) == [VM, "sample-grace-hopper"]
    assert cloud.run("down", "sample-grace-hopper").status == 0
    assert cloud.home(0).exists()


def test_a_rebuilt_artifact_follows_and_deletes_the_machine_of_its_older_build(
    clouds: Callable[..., Cloud],
) -> None:
    cloud = clouds(prepared=True)
    first = start_training(cloud, "train")
    until(lambda: cloud.calls("host.sh follow"))
    first.interrupt()
    first.ends()
    lock = cloud.laptop / "generated/sample/recipe.lock.json"
    lock.write_text(lock.read_text().replace('"compiler"', '"compiler" '))
    second = cloud.start("run")
    until(lambda: len(cloud.calls("host.sh follow")) > 1)
    (cloud.folder / "go").touch()
    ran = second.ends()
    assert ran.status == 0 and f"A training of another build of sample runs on {VM}" in ran.err
    ran = cloud.run("down", VM)
    assert ran.status == 0 and f"{VM} was created from another build of sample" in ran.err
    assert len(cloud.calls("tpu-vm delete")) == 1


def test_a_vm_without_labels_or_of_another_recipe_is_not_changed(clouds: Callable[..., Cloud]) -> None:
    cloud = clouds(prepared=True)
    labels = cloud.folder / "labels" / VM
    owner, _, digest = labels.read_text().split("\t")
    labels.write_text(f"{owner}\tother\t{digest}")
    ran = cloud.run("down", VM)
    assert ran.status == 1 and "was created from the recipe other, not from sample" in ran.err
    labels.write_text("\t\t\n")
    ran = cloud.run("down", VM)
    assert ran.status == 1 and "has no label that says who created it" in ran.err
    assert f"--update-labels=recipec_owner={owner},recipec_recipe=sample" in ran.err
    assert not cloud.calls("delete")
    labels.write_text(f"{owner}\tsample\t\n")  # as that command labels it
    ran = cloud.run("down", VM)
    assert ran.status == 0 and "build" not in ran.err and len(cloud.calls("delete")) == 1


@pytest.mark.parametrize(
    ("account", "name"),
    [
        ("ada@example.com", "sample-ada"),
        ("Ada.B_Lovelace+tpu@example.com", "sample-ada-b-lovelace-tpu"),
        ("-.-@example.com", r"sample-\d+"),
        ("\u00c4da@example.com", "sample-da"),
        ("a-very-long-name-of-a-person@example.com", "sample-a-very-long-name-of"),
        ("123-compute@developer.gserviceaccount.com", "sample-[a-z0-9-]+"),
    ],
)
def test_names_and_labels_are_valid_in_google_cloud(
    account: str, name: str, clouds: Callable[..., Cloud]
) -> None:
    cloud = clouds(hosts=1)
    cloud.sign_in(account)
    vm = cloud.run("name").out.strip()
    assert re.fullmatch(name, vm) and re.fullmatch(r"[a-z][-a-z0-9]{0,58}[a-z0-9]", vm)
    assert cloud.run("up").status == 0 and cloud.run("up").status == 0
    (create,) = cloud.calls("tpu-vm create")
    (labels,) = re.findall(r"--labels=(\S+)", create)
    values = dict(label.split("=") for label in labels.split(","))
    assert list(values) == ["recipec_owner", "recipec_recipe", "recipec_artifact"]
    assert all(re.fullmatch(r"[a-z0-9_-]{1,63}", value) for value in values.values())
    assert cloud.run("down", vm).status == 0


def test_a_chosen_name_is_used_if_it_is_valid(clouds: Callable[..., Cloud]) -> None:
    cloud = clouds(hosts=1)
    for wrong in ("Mine", "1st", "my_vm", "mine-", "m" * 61):
        ran = cloud.run("up", VM=wrong)
        assert ran.status == 1 and f"error: VM is `{wrong}`" in ran.err and "unset VM" in ran.err
    assert not cloud.lines("calls")
    assert cloud.run("up", VM="mine").status == 0 and cloud.calls("tpu-vm create mine ")
    ran = cloud.run("run", "mine")
    assert ran.status == 1 and "export VM=mine" in ran.err
    assert cloud.run("down", "mine", VM="mine").status == 0
    (cloud.folder / "account").write_text("")
    ran = cloud.run("up")
    assert ran.status == 1 and "error: gcloud is signed in with no account" in ran.err
