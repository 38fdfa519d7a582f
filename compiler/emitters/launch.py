"""launch/: what starts the run on its machines: Cloud TPU VMs, a JobSet, SkyPilot, xpk.

host.sh is what they all run on each host; the others make the machines and call it there.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from compiler.emitters.places import in_words, is_hub_id, places
from compiler.launching import bucket_of, launchers, machines
from compiler.render import render, shell_word
from compiler.serving.container import CLOUD_SDK_IMAGE
from compiler.wording import listing, plural

if TYPE_CHECKING:
    from compiler.hardware import Accelerator
    from compiler.program import Program
    from spec.language.launch import Launch

UV = "0.13.9"
"""The version of uv that makes the environment of a host."""

VM_NAME = 60
"""The longest name of a VM (63 characters), less the number of a slice."""

JOBSET_NAME = 44
"""The longest name of a JobSet: its pods are called NAME-slice-SLICE-HOST-abcde, in 63 characters."""

XPK_NAME = 40
"""The longest name of a workload that xpk takes."""

STATE_BYTES = 12
"""Of each trained parameter in a checkpoint: its value and two moments, in float32."""

SAVED_PER_SECOND = 200e6
"""Bytes of a checkpoint that a host surely writes to a bucket in a second; the hosts write at once."""

STEP_SECONDS = 240
"""For the step in progress, and for what has to be agreed between the hosts."""


def emit_launch(program: Program) -> dict[str, str]:
    """The files of launch/ by path; none for a recipe that runs on this machine's own CPU."""
    if program.accelerator.platform != "tpu":
        return {}
    kinds = launchers(program.recipe, program.accelerator)
    if not kinds:
        return {}
    values = _values(program) | {"vm": "tpu-vm" in kinds}
    files = {"launch/host.sh": render("launch/host.sh", **values)}
    if "tpu-vm" in kinds:
        files["launch/tpu-vm.sh"] = render("launch/tpu-vm.sh", **values, **_tpu_vm(program))
    if "gke" in kinds:
        app = _short(program.name, JOBSET_NAME)
        files["launch/jobset.yaml"] = render("launch/jobset.yaml", **values, **_jobset(program, app))
    if "skypilot" in kinds:
        files["launch/skypilot.yaml"] = render("launch/skypilot.yaml", **values, **_skypilot(program))
    if "xpk" in kinds:
        app = _short(program.name, XPK_NAME)
        files["launch/xpk.sh"] = render("launch/xpk.sh", **values, **_xpk(program), app=app)
    return files


def launch_section(program: Program) -> dict[str, Any]:
    """What the README says about launch/."""
    kinds = launchers(program.recipe, program.accelerator) if program.accelerator.platform == "tpu" else []
    return {
        "launchers": kinds,
        "asks_for_zone": program.recipe.launch.zone is None,
        "vm": vm_name(program.name),
        "slices": program.accelerator.slices,
        "archive": _archive(program) if "gke" in kinds else None,
        "secret_flags": _secret_flags(program),
    }


def accelerator_type(name: str) -> str:
    """The name that gcloud knows an accelerator by: v5e is called v5litepod there."""
    return re.sub(r"^v5e-", "v5litepod-", name)


def vm_name(name: str) -> str:
    """What the Cloud TPU VM of a recipe of this name is called."""
    return _short(name, VM_NAME)


def place_flags(launch: Launch) -> list[str]:
    """The flags that say where a TPU VM is, for a shell; ZONE stands for one that the recipe leaves open."""
    project = [f"--project={shell_word(launch.project)}"] if launch.project else []
    return [f"--zone={shell_word(launch.zone or 'ZONE')}", *project]


def grace_seconds(program: Program) -> int:
    """How long a host may take from the order to stop to its end: the step in progress, and a checkpoint."""
    saved = program.trainable_parameters * STATE_BYTES / program.accelerator.hosts / SAVED_PER_SECOND
    return math.ceil((STEP_SECONDS + saved) / 60) * 60


def _values(program: Program) -> dict[str, Any]:
    """What several of the files say."""
    recipe, accelerator, found = program.recipe, program.accelerator, places(program)
    launch, made = recipe.launch, machines(accelerator)
    source = "hub" if is_hub_id(recipe.model.id) else "bucket" if "://" in recipe.model.id else "folder"
    size = in_words(found.size)
    stage = {
        "hub": f"the base weights, {size}, into $WEIGHTS ({found.staging})",
        "bucket": f"the base weights, {size}, from their bucket into $WEIGHTS ({found.staging})",
        "folder": f"sees that the base weights, {size}, are in $WEIGHTS ({found.staging})",
    }[source]
    return {
        "name": program.name,
        "vm_name": vm_name(program.name),
        "machines_line": _machines_line(accelerator),
        "hosts": accelerator.hosts,
        "slices": made.slices,
        "hosts_per_slice": made.hosts_per_slice,
        "chips_per_host": made.chips_per_host,
        "spot": launch.spot,
        "reservation": launch.reservation,
        "project": launch.project,
        "zone": launch.zone,
        "service_account": launch.service_account,
        "image": launch.image,
        "max_restarts": launch.max_restarts,
        "grace": grace_seconds(program),
        "model": recipe.model.id,
        "revision": recipe.model.revision,
        "source": source,
        "stage_line": stage,
        "copy_help": f"copy {recipe.model.id} there, on every host",
        "staging": found.staging,
        "weights": size,
        "weights_mib": math.ceil(found.size / 2**20),
        "merged": found.merged,
        "merged_in_bucket": "://" in found.merged,
        "merge_flags": found.merge_flags,
        "adapter": recipe.merge.adapter and program.lora is not None,
        "tokens": _tokens(program),
        "uv": UV,
    }


def _tokens(program: Program) -> list[str]:
    """Secrets that the hosts are handed, by the names of their variables."""
    tokens = ["HF_TOKEN"] if is_hub_id(program.recipe.model.id) else []
    return [*tokens, "WANDB_API_KEY"] if program.recipe.train.log.wandb_project else tokens


def _machines_line(accelerator: Accelerator) -> str:
    """ "v5p-16 (2 hosts of 4 chips)", "2 slices of v5e-8 (a host of 8 chips each)"."""
    made = machines(accelerator)
    chips = plural(made.chips_per_host, "chip")
    hosts = f"a host of {chips}" if made.hosts_per_slice == 1 else f"{made.hosts_per_slice} hosts of {chips}"
    if made.slices == 1:
        return f"{accelerator.name} ({hosts})"
    return f"{made.slices} slices of {accelerator.name} ({hosts} each)"


def _tpu_vm(program: Program) -> dict[str, Any]:
    recipe, accelerator = program.recipe, program.accelerator
    launch, several = recipe.launch, accelerator.slices > 1
    version = shell_word(launch.runtime_version or accelerator.runtime_version or "")
    kind = f"--accelerator-type={accelerator_type(accelerator.name)}"
    extra = []
    if launch.network:
        extra.append(f"--network={shell_word(launch.network)}")
    if launch.subnetwork:
        extra.append(f"--subnetwork={shell_word(launch.subnetwork)}")
    if launch.service_account:
        extra.append(f"--service-account={shell_word(launch.service_account)}")
    capacity = ["--spot"] if launch.spot else []
    capacity += [f"--reservation={shell_word(launch.reservation)}"] if launch.reservation else []
    nodes = [f"{vm_name(program.name)}-{i}" for i in range(accelerator.slices)] if several else []
    ids = (
        [f"--node-count={accelerator.slices}", '--node-prefix="$name"'] if several else ['--node-id="$name"']
    )
    wait = [f"--valid-until-duration={launch.queue_for}"] if launch.queue_for else []
    return {
        "nodes": nodes or ["$name"],
        "first": "${nodes[0]}" if several else "$name",
        "queued": launch.queued or several,
        # A reservation by its name is the alpha commands' alone.
        "alpha": launch.reservation is not None,
        "create_flags": ['"$name"', f"{kind} --version={version}", *_line([*capacity, *extra])],
        "queue_flags": [
            '"$name"',
            " ".join(ids),
            f"{kind} --runtime-version={version}",
            *_line([*capacity, *extra, *wait]),
        ],
        "tokens_given": "".join(f"${{{token}:-}}" for token in _tokens(program)),
        "checkpoints": recipe.checkpoint.directory,
        "checkpoints_in_bucket": "://" in recipe.checkpoint.directory,
    }


def _line(flags: list[str]) -> list[str]:
    return [" ".join(flags)] if flags else []


def _jobset(program: Program, app: str) -> dict[str, Any]:
    recipe, accelerator, found = program.recipe, program.accelerator, places(program)
    archive = _archive(program)
    touched = dict.fromkeys(bucket_of(place) for place in (recipe.checkpoint.directory, archive))
    shared = math.ceil(found.size * 1.1 / 2**30) + 2
    return {
        "app": app,
        "archive": archive,
        "buckets": listing(touched),
        "unpack": f"gcloud storage cat {shell_word(archive)} | tar xz",
        "cloud_sdk": CLOUD_SDK_IMAGE,
        "gke_accelerator": accelerator.gke_accelerator,
        "topology": accelerator.topology,
        # Chips that are one machine or two.
        "count": machines(accelerator).chips_per_host if accelerator.topology == "2x4" else None,
        "memory_gib": shared,
        "grace_reason": "For the step in progress and its checkpoint"
        + ("; where a spot node is taken away, Google Cloud leaves less." if recipe.launch.spot else "."),
    }


def _skypilot(program: Program) -> dict[str, Any]:
    launch, accelerator = program.recipe.launch, program.accelerator
    region = launch.zone.rpartition("-")[0] if launch.zone else None
    return {
        "infra": f"gcp/{region}/{launch.zone}" if region else "gcp",
        "accelerator_type": accelerator_type(accelerator.name),
        "runtime_version": launch.runtime_version or accelerator.runtime_version,
        "gcp_queued": launch.queued,
        "secret_flags": _secret_flags(program),
    }


def _xpk(program: Program) -> dict[str, Any]:
    launch, accelerator = program.recipe.launch, program.accelerator
    generation = accelerator_type(f"{accelerator.generation}-")
    capacity = " --spot" if launch.spot else ""
    capacity += f" --reservation={shell_word(launch.reservation)}" if launch.reservation else ""
    return {
        "cluster": launch.cluster,
        "tpu_type": f"{generation}{accelerator.topology}",
        "capacity": f" \\\n        {capacity.strip()}" if capacity else "",
    }


def _archive(program: Program) -> str:
    """Where the packed artifact lies for GKE."""
    bucket = program.recipe.launch.bucket or bucket_of(program.recipe.checkpoint.directory)
    return f"{bucket}/{program.name}.tar.gz"


def _secret_flags(program: Program) -> str:
    """What hands a managed job its secrets, with a space before."""
    return "".join(f" --secret {token}" for token in _tokens(program))


def _short(name: str, length: int) -> str:
    return name[:length].rstrip("-")
