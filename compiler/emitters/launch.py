"""Emit launch/: the files that start the run on its machines: Cloud TPU VMs, a JobSet, SkyPilot, xpk.

All of them run host.sh on each host; the other files create the machines and call it there. The scripts
contain only values, and pass them to the scripts of runtime/launch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from recipec.compiler.emitters.places import in_artifact, is_hub_id, places
from recipec.compiler.lowering.hardware import generations
from recipec.compiler.lowering.launching import bucket_of, launchers, machines
from recipec.compiler.render import render, shell_word
from recipec.compiler.vllm.container import CLOUD_SDK_IMAGE
from recipec.compiler.wording import listing, plural

if TYPE_CHECKING:
    from recipec.compiler.lowering.hardware import Accelerator
    from recipec.compiler.lowering.program import Program
    from recipec.spec.language.launch import Launch

TASK_NAME = 60
"""The longest name of a SkyPilot task, minus room for the number of a node."""

JOBSET_NAME = 44
"""The longest name of a JobSet. Its pods are called NAME-slice-SLICE-HOST-abcde, in 63 characters."""

XPK = "1.9.0"
"""The version of xpk that its script was tested with."""

STATE_BYTES = 12
"""Bytes of each trained parameter in a checkpoint: its value and two moments, in float32."""

SAVED_PER_SECOND = 200e6
"""A safe lower bound of the bytes that a host writes to a bucket per second. All hosts write in parallel."""

STEP_SECONDS = 240
"""Seconds for the step in progress, and for the agreement between the hosts."""


def emit_launch(program: Program) -> dict[str, str]:
    """Return the files of launch/ by path; {} for a recipe that runs on this machine's CPU."""
    if program.accelerator.platform != "tpu":
        return {}
    kinds = launchers(program.recipe, program.accelerator)
    if not kinds:
        return {}
    values = _values(program)
    on_vms = "tpu-vm" in kinds
    files = {"launch/host.sh": render("launch/host.sh", **values, words=_host(program, on_vms))}
    if on_vms:
        files["launch/tpu-vm.sh"] = render("launch/tpu-vm.sh", **values, words=_tpu_vm(program))
    if "gke" in kinds:
        app = _short(program.name, JOBSET_NAME)
        files["launch/jobset.yaml"] = render("launch/jobset.yaml", **values, **_jobset(program, app))
    if "skypilot" in kinds:
        files["launch/skypilot.yaml"] = render("launch/skypilot.yaml", **values, **_skypilot(program))
    if "xpk" in kinds:
        files["launch/xpk.sh"] = render("launch/xpk.sh", **values, words=_xpk(program))
    return files


def launch_section(program: Program) -> dict[str, Any]:
    """Return what the README says about launch/."""
    kinds = launchers(program.recipe, program.accelerator) if program.accelerator.platform == "tpu" else []
    restarts = program.recipe.launch.max_restarts
    return {
        "launchers": kinds,
        "asks_for_zone": program.recipe.launch.zone is None,
        "slices": program.accelerator.slices,
        "archive": _archive(program) if "gke" in kinds else None,
        "secret_flags": _secret_flags(program),
        "tokens": run_tokens(program),
        "restarts": plural(restarts, "time") if restarts else None,
        "jobset": _short(program.name, JOBSET_NAME),
        "xpk": XPK,
    }


def accelerator_type(name: str) -> str:
    """Return gcloud's name of an accelerator: v5e-8 is called v5litepod-8 there."""
    generation, _, number = name.partition("-")
    return f"{generations()[generation]['gcloud']}-{number}"


def place_flags(launch: Launch) -> list[str]:
    """Return the shell flags for a TPU VM's location; ZONE stands for a zone that the recipe leaves open."""
    project = [f"--project={shell_word(launch.project)}"] if launch.project else []
    return [f"--zone={shell_word(launch.zone or 'ZONE')}", *project]


def grace_seconds(program: Program) -> int:
    """Return the seconds that a host may take to stop: for the step in progress, and for a checkpoint."""
    saved = program.trainable_parameters * STATE_BYTES / program.accelerator.hosts / SAVED_PER_SECOND
    return math.ceil((STEP_SECONDS + saved) / 60) * 60


def _values(program: Program) -> dict[str, Any]:
    """Return the values that several of the files use."""
    recipe, accelerator = program.recipe, program.accelerator
    launch, pool = recipe.launch, machines(accelerator)
    return {
        "name": program.name,
        "machines_line": _machines_line(accelerator),
        "slices": pool.slices,
        "hosts_per_slice": pool.hosts_per_slice,
        "chips_per_host": pool.chips_per_host,
        "spot": launch.spot,
        "reservation": launch.reservation,
        "service_account": launch.service_account,
        "image": launch.image,
        "max_restarts": launch.max_restarts,
        "grace": grace_seconds(program),
        "tokens": run_tokens(program),
    }


def _host(program: Program, stopped: bool) -> list[str]:
    """Return the arguments that the artifact's host.sh passes to the runtime's host.sh.

    Args:
        stopped: whether host.sh is also called to stop and to merge, which pods and managed jobs do not do.
    """
    recipe, folders = program.recipe, places(program)
    model, revision = recipe.model.id, recipe.model.revision
    words = {"name": program.name}
    if is_hub_id(model):
        words |= {"hub": model} | ({"revision": revision} if revision else {})
    else:
        words["folder"] = model
    words["weights"] = folders.staging
    if "hub" in words:
        words["weights-mib"] = str(math.ceil(folders.size / 2**20))
    if stopped:
        words["stop-seconds"] = str(grace_seconds(program))
        words |= {f"merge-{flag}": place for flag, place in folders.merge_flags.items()}
    return _words(words)


def _words(values: Mapping[str, str]) -> list[str]:
    """Return words of a shell's array: --key=value."""
    return [f"--{key}={shell_word(value)}" for key, value in values.items()]


def run_tokens(program: Program) -> list[str]:
    """Return the variables of the secrets, and of an address, that the hosts are given."""
    tokens = ["HF_TOKEN"] if is_hub_id(program.recipe.model.id) else []
    log = program.recipe.train.log
    tokens += ["WANDB_API_KEY"] if log.wandb_project else []
    return tokens + (["MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN"] if log.mlflow_experiment else [])


def _machines_line(accelerator: Accelerator) -> str:
    """Describe the machines: "v5p-16 (2 hosts of 4 chips)", "2 slices of v5e-8 (a host of 8 chips each)"."""
    pool = machines(accelerator)
    chips = plural(pool.chips_per_host, "chip")
    hosts = f"a host of {chips}" if pool.hosts_per_slice == 1 else f"{pool.hosts_per_slice} hosts of {chips}"
    if pool.slices == 1:
        return f"{accelerator.name} ({hosts})"
    return f"{pool.slices} slices of {accelerator.name} ({hosts} each)"


def _tpu_vm(program: Program) -> list[str]:
    """Return the arguments that the artifact's tpu-vm.sh passes to the runtime's tpu-vm.sh."""
    recipe, accelerator, folders = program.recipe, program.accelerator, places(program)
    launch, several = recipe.launch, accelerator.slices > 1
    where = {"project": launch.project} if launch.project else {}
    machine = {
        "accelerator-type": accelerator_type(accelerator.name),
        "runtime-version": launch.runtime_version or accelerator.runtime_version or "",
    }
    network = {
        "network": launch.network,
        "subnetwork": launch.subnetwork,
        "service-account": launch.service_account,
    }
    results = {"checkpoints": in_artifact(program, recipe.checkpoint.directory), "merged": folders.merged}
    adapter = recipe.merge.adapter and program.lora is not None
    return [
        *_words({"name": program.name}),
        _zone(launch),
        *_words(where | machine),
        *_words({"slices": str(accelerator.slices)} if several else {}),
        *_words({"hosts": str(accelerator.hosts)}),
        *_capacity(launch),
        *_words({key: value for key, value in network.items() if value}),
        *(["--queued"] if launch.queued or several else []),
        *_words({"valid-until-duration": launch.queue_for} if launch.queue_for else {}),
        *_words({"max-restarts": str(launch.max_restarts)}),
        *_token_words(program),
        *_words(results),
        *(["--adapter"] if adapter else []),
    ]


def _zone(launch: Launch) -> str:
    """Return the recipe's zone, or the zone of the user who launches."""
    return f"--zone={shell_word(launch.zone)}" if launch.zone else '--zone="${ZONE:-}"'


def _capacity(launch: Launch) -> list[str]:
    words = ["--spot"] if launch.spot else []
    return [*words, *_words({"reservation": launch.reservation} if launch.reservation else {})]


def _token_words(program: Program) -> list[str]:
    return [f"--token={token}" for token in run_tokens(program)]


def _jobset(program: Program, app: str) -> dict[str, Any]:
    recipe, accelerator, folders = program.recipe, program.accelerator, places(program)
    archive = _archive(program)
    touched = dict.fromkeys(bucket_of(place) for place in (recipe.checkpoint.directory, archive))
    shared = math.ceil(folders.size * 1.1 / 2**30) + 2
    return {
        "app": app,
        "archive": archive,
        "buckets": listing(touched),
        "unpack": f"gcloud storage cat {shell_word(archive)} | tar xz",
        "cloud_sdk": CLOUD_SDK_IMAGE,
        "gke_accelerator": accelerator.gke_accelerator,
        "topology": accelerator.topology,
        # A slice that is one machine or two.
        "count": machines(accelerator).chips_per_host if accelerator.topology == "2x4" else None,
        "memory_gib": shared,
        "grace_reason": "For the step in progress and its checkpoint"
        + ("; if a spot node is preempted, Google Cloud leaves less." if recipe.launch.spot else "."),
    }


def _skypilot(program: Program) -> dict[str, Any]:
    launch, accelerator = program.recipe.launch, program.accelerator
    region = launch.zone.rpartition("-")[0] if launch.zone else None
    return {
        "task": _short(program.name, TASK_NAME),
        "infra": f"gcp/{region}/{launch.zone}" if region else "gcp",
        "accelerator_type": accelerator_type(accelerator.name),
        "runtime_version": launch.runtime_version or accelerator.runtime_version,
        "gcp_queued": launch.queued,
        "secrets": run_tokens(program),
        "secret_flags": _secret_flags(program),
    }


def _xpk(program: Program) -> list[str]:
    """Return the arguments that the artifact's xpk.sh passes to the runtime's xpk.sh."""
    launch, accelerator = program.recipe.launch, program.accelerator
    tpu_type = f"{generations()[accelerator.generation]['gcloud']}-{accelerator.topology}"
    return [
        *_words({"name": program.name}),
        f"--cluster={shell_word(launch.cluster)}" if launch.cluster else '--cluster="${CLUSTER:-}"',
        _zone(launch),
        *_words({"project": launch.project} if launch.project else {}),
        *_words({"tpu-type": tpu_type, "num-slices": str(accelerator.slices)}),
        *_capacity(launch),
        *_words({"image": launch.image}),
        *_token_words(program),
        *_words({"max-restarts": str(launch.max_restarts)}),
        *_words({"termination-grace-period-seconds": str(grace_seconds(program))}),
    ]


def _archive(program: Program) -> str:
    """Return where the packed artifact lies for GKE."""
    bucket = program.recipe.launch.bucket or bucket_of(program.recipe.checkpoint.directory)
    return f"{bucket}/{program.name}.tar.gz"


def _secret_flags(program: Program) -> str:
    """Return the flags that pass secrets to a managed job, with a leading space."""
    return "".join(f" --secret {token}" for token in run_tokens(program))


def _short(name: str, length: int) -> str:
    return name[:length].rstrip("-")
