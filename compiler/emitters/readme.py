"""Emit an artifact's README.md: its files, the run's figures, and the steps with this recipe's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from textwrap import fill
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from recipec.compiler import card
from recipec.compiler.emitters.launch import accelerator_type, launch_section, place_flags
from recipec.compiler.emitters.lock import compiler_name
from recipec.compiler.emitters.places import is_hub_id, places
from recipec.compiler.emitters.probe import has_probe
from recipec.compiler.emitters.rollout import has_server
from recipec.compiler.emitters.server import serving_name
from recipec.compiler.emitters.settings_text import kind
from recipec.compiler.lowering import pins
from recipec.compiler.lowering.references import asks_chats, inputs, schemas
from recipec.compiler.pages import markdown
from recipec.compiler.pages.numbers import file_size
from recipec.compiler.render import code_span, render, shell_word
from recipec.compiler.vllm.container import SHUTDOWN_MARGIN_SECONDS, Container, container, own_address
from recipec.compiler.wording import listing, mesh_axes, plural, rounded
from recipec.runtime.clients.hosts import is_loopback
from recipec.runtime.training.objectives import settings_of, stores

if TYPE_CHECKING:
    from recipec.compiler.lowering.backend import Backend
    from recipec.compiler.lowering.hardware import Accelerator
    from recipec.compiler.lowering.program import Program
    from recipec.compiler.vllm.weights import ServedWeights
    from recipec.spec.language.launch import Launch


def emit_readme(program: Program, backends: Sequence[Backend] = ()) -> str:
    """Return the text of README.md.

    Args:
        backends: the backends besides Tunix that the artifact is built for.
    """
    recipe, accelerator = program.recipe, program.accelerator
    folders = places(program)
    staging, large, merged = folders.staging, folders.large, folders.merged
    cpu = accelerator.platform == "cpu"
    serving = program.serve_accelerator
    serves_elsewhere = serving is not None and serving != accelerator
    data = [code_span(path) for path in inputs(recipe).values() if "://" not in path]
    return render(
        "README.md",
        name=program.name,
        compiler=compiler_name(),
        kind=kind(program),
        backends=backends,
        notebook=program.notebook,
        full=program.lora is None,
        probe=has_probe(program),
        transforms=_files(recipe.data.transforms.values()),
        rewards=_files(reward.function for reward in recipe.rewards if reward.function),
        teacher_flag=_teacher_flag(program),
        stored=recipe.train.distill.stored if recipe.train.distill and stores(recipe.train) else None,
        rollout=recipe.rollout if has_server(program) else None,
        rollout_folder=rollout_folder(program),
        rollout_loopback=is_loopback(urlsplit(recipe.rollout.url).hostname or ""),
        schemas=list(dict.fromkeys(schemas(recipe).values())),
        model=recipe.model.id,
        revision=recipe.model.revision,
        accelerator=accelerator,
        described=accelerator.describe(),
        figures=_figures(program),
        card=markdown.table(card.table(program)),
        notes=program.notes,
        cpu=cpu,
        large=large,
        where=" ".join(place_flags(recipe.launch)),
        hosts=accelerator.hosts,
        **launch_section(program),
        gcs=pins.uses_gcs(program),
        wandb_project=recipe.train.log.wandb_project,
        mlflow_experiment=recipe.train.log.mlflow_experiment,
        weights=file_size(folders.size),
        downloads=is_hub_id(recipe.model.id),
        staging=staging,
        model_flag="" if cpu and is_hub_id(recipe.model.id) else f" --model {staging}",
        merge_flags=_flags(folders.merge_flags),
        data=listing(data),
        checkpoints=recipe.checkpoint.directory,
        local_checkpoints="://" not in recipe.checkpoint.directory,
        merged=merged,
        adapter=recipe.merge.adapter and program.lora is not None,
        best=recipe.data.evaluates,
        keep=large or serves_elsewhere,
        serve=recipe.serve,
        serve_accelerator=serving,
        served_on=serving and serving.describe(),
        serves_elsewhere=serves_elsewhere,
        serve_create=create_command(serving_name(program.name), serving, recipe.launch) if serving else [],
        **_serve_section(program, merged, serves_elsewhere),
        vllm=pins.sets()["serve"]["vllm-tpu"],
    )


def rollout_folder(program: Program) -> str:
    """Return the folder in which train.py writes adapters for a rollout server, in words."""
    named = program.recipe.rollout.adapter_path
    return code_span(named) if named else "`rollout-adapters` in the checkpoint directory"


def _teacher_flag(program: Program) -> str:
    """Return the option with the folder of a teacher that is not on the hub; "" without one."""
    distill = program.recipe.train.distill
    if program.teacher is None or distill is None or is_hub_id(distill.teacher.id):
        return ""
    return " --teacher TEACHER_DIR"


def _files(functions: Iterable[str]) -> list[str]:
    """Return the files of functions FILE:NAME."""
    return list(dict.fromkeys(function.partition(":")[0] for function in functions))


def _flags(flags: Mapping[str, str]) -> str:
    """Return flags on their own line, to append to a shell command; "" for none."""
    words = " ".join(f"--{name} {shell_word(value)}" for name, value in flags.items())
    return f" \\\n    {words}" if words else ""


def create_command(vm: str, accelerator: Accelerator, launch: Launch) -> list[str]:
    """Return the gcloud command that creates a TPU VM, by lines; [] if there is no such VM."""
    if accelerator.runtime_version is None:
        return []
    lines = [
        f"gcloud compute tpus tpu-vm create {vm}",
        f"--accelerator-type={accelerator_type(accelerator.name)}",
        f"--version={shell_word(launch.runtime_version or accelerator.runtime_version)}",
        *place_flags(launch),
    ]
    return [*lines, "--spot"] if launch.spot else lines


def _figures(program: Program) -> list[tuple[str, str]]:
    """Return the figures of the run as rows of a table."""
    recipe, train = program.recipe, program.recipe.train
    axes = mesh_axes(recipe.mesh.axes)
    filling = "packed with several samples" if recipe.data.packing else "one sample, padded"
    figures = [
        ("Devices", f"{program.accelerator.devices}, mesh {axes}{_hosts(program)}"),
        ("Data-parallel size", str(program.data_parallel)),
        (
            "Rows per optimizer step",
            f"{train.global_batch_size} = micro-batch {train.micro_batch_size} x data-parallel "
            f"{program.data_parallel} x accumulation {program.accumulation_steps}",
        ),
        ("Row", f"{recipe.data.max_length:,} tokens, {filling}"),
        ("Length", plural(train.steps, "step") if train.steps else plural(train.epochs or 1, "epoch")),
        ("Base", f"{program.base_parameters:,} parameters in {recipe.model.dtype}"),
    ]
    if program.lora is not None:
        lora, model, trainable = program.lora, recipe.model, program.trainable_parameters
        share = trainable / program.base_parameters
        figures += [
            ("Trainable", f"{trainable:,} parameters ({share:.2%}) in {lora.dtype}"),
            (
                "LoRA",
                f"rank {lora.rank}, alpha {lora.alpha:g}, dropout {lora.dropout:g}, on "
                f"{plural(len(program.adapters), 'projection')}"
                + (f", on a base in {model.quantization}" if model.quantization else "")
                + (", by products in eight bits" if model.quantized_matmul else ""),
            ),
            ("LoRA reaches", str(program.reach)),
        ]
    elif recipe.train.trainable_modules:
        trainable = program.trainable_parameters
        share = trainable / program.base_parameters
        figures.append(
            (
                "Trainable",
                f"{trainable:,} parameters ({share:.2%}) of {listing(recipe.train.trainable_modules)}",
            )
        )
    else:
        figures.append(("Trainable", "every parameter"))
    if (qat := train.qat) is not None:
        later = f", from step {qat.start_step + 1}" if qat.start_step else ""
        figures.append(("Rounded in training", f"{rounded(qat)}{later}; the merged weights are not"))
    if train.objective != "sft":
        figures.append(("Objective", train.objective.upper() + settings_of(train.model_dump())))
    figures += [("Optimizer", _optimizer(program)), ("Checkpoints", _checkpoints(program))]
    price = _price(program)
    return [*figures, ("Price", price)] if price else figures


def _hosts(program: Program) -> str:
    hosts = program.accelerator.hosts
    return f", on {plural(hosts, 'host')}" if hosts > 1 else ""


def _optimizer(program: Program) -> str:
    optimizer, schedule = program.recipe.train.optimizer, program.recipe.train.schedule
    warmup = ""
    if schedule.warmup_ratio:
        warmup = f" after a warm-up over {schedule.warmup_ratio:.4g} of the steps"
    elif schedule.warmup_steps:
        warmup = f" after a warm-up of {plural(schedule.warmup_steps, 'step')}"
    share = f"{schedule.min_lr_ratio:g} of the peak" if schedule.min_lr_ratio else "0"
    decay = f" to {share}" if schedule.name != "constant" else ""
    clip = f"clipped to norm {optimizer.max_grad_norm:g}" if optimizer.max_grad_norm else "no clipping"
    name = {"adamw": "AdamW", "rmsprop": "RMSprop", "sgd": "SGD"}.get(
        optimizer.name, optimizer.name.capitalize()
    )
    first = program.recipe.train.continue_from
    warmup += "" if first is None else f", a new schedule after step {first:,}"
    return (
        f"{name}, peak learning rate {optimizer.learning_rate:g}, {schedule.name}{decay}{warmup}, "
        f"weight decay {optimizer.weight_decay:g}, {clip}"
    )


def _checkpoints(program: Program) -> str:
    checkpoint = program.recipe.checkpoint
    every = plural(checkpoint.every_steps, "step")
    out = f"every {every}, the newest {checkpoint.keep} kept, in {code_span(checkpoint.directory)}"
    if checkpoint.keep_best:
        out += "; also the one of the lowest evaluation loss"
    if (local := checkpoint.local) is not None:
        out += f"; every {plural(local.every_steps, 'step')} in {code_span(local.directory)} on each host"
    return out


def _price(program: Program) -> str | None:
    price, accelerator = program.recipe.cost.train_usd_per_hour, program.accelerator
    if price is not None:
        return f"US$ {price:,.2f} per hour, as the recipe says"
    if accelerator.usd_per_chip_hour is None:
        return None
    total = accelerator.usd_per_chip_hour * accelerator.chips
    return f"US$ {total:,.2f} per hour on demand, list price of {accelerator.price_date}"


POOL_NAME = 40
"""The longest name of a node pool."""

ANY_FOLDER = "WEIGHTS_DIR"
"""The placeholder in commands for a folder that the recipe does not know."""


def _serve_section(program: Program, merged: str, elsewhere: bool) -> dict[str, Any]:
    """Return the values of parts/serve.md, reduced to a minimum without a `serve` section.

    Args:
        merged: where the previous commands leave the merged weights.
        elsewhere: whether the serving machine differs from the training machine.
    """
    recipe = program.recipe
    serve, accelerator = recipe.serve, program.serve_accelerator
    if serve is None or accelerator is None:
        return {"server": None, "kept": merged, "kubernetes": False}
    server, app = container(recipe, program.family.name), serving_name(program.name)
    # The folder that merging writes and the server reads, None if it is not on a disk of the machine.
    kept = f"{merged}-adapter" if server.adapter else merged
    written = server.adapter or (server.model if serve.model is None else None)
    taken = kept if written is not None and written.kind == "folder" else None
    here = "" if "://" in kept else kept
    there = f"/dev/shm/{PurePosixPath(kept).name}" if elsewhere else here
    return {
        "server": server,
        "kept": kept,
        "taken": taken,
        "taken_from": kept
        if "://" in kept
        else f"gs://BUCKET/models/{recipe.name}/{PurePosixPath(kept).name}",
        "serve_weights": _weights(server, written is server.model),
        "exports": _exports(server, there if taken else None),
        "finish_seconds": server.stop_grace_seconds - SHUTDOWN_MARGIN_SECONDS,
        "url": f"http://{own_address(server.host)}:{server.port}",
        "chats": asks_chats(recipe),
        "evaluates": bool(recipe.evaluate.prompts or recipe.evaluate.tasks),
        "tasks": bool(recipe.evaluate.tasks),
        "kubernetes": accelerator.gke_machine is not None,
        "app": app,
        "pool": app[:POOL_NAME].rstrip("-"),
        "zone": shell_word(recipe.launch.zone or "ZONE"),
        "buckets": list(dict.fromkeys("/".join(w.address.split("/")[:3]) for w in _copied(server))),
        "by_hand": _by_hand(server, here if taken else None),
    }


def _weights(server: Container, merges: bool) -> str:
    """Return a paragraph that says where the server finds the weights; "" if the commands show it."""
    model, adapter = server.model, server.adapter
    sentences = []
    if adapter is not None:
        sentences.append(f"It serves the adapter as `{server.name}` next to its base, `{server.name}-base`.")
    if model.kind == "hub":
        sentences.append(
            f"vLLM downloads {code_span(model.address)} from the Hugging Face hub; if its license has to "
            "be accepted, do that on its page and set `HF_TOKEN`."
        )
    elif model.kind == "folder" and not merges:
        place = f"are in {code_span(model.address)}; `MODEL_DIR` names another folder"
        folder = place if model.address else ""
        sentences.append(f"Its weights {folder or 'are where `MODEL_DIR` says'}.")
    for weights in _copied(server):
        sentences.append(
            f"The files in {code_span(weights.address)} are copied before the server starts, by the "
            "machine's account; files that were already copied are skipped."
        )
    return fill(" ".join(sentences), width=118, break_long_words=False, break_on_hyphens=False)


def _exports(server: Container, taken: str | None) -> list[str]:
    """Return shell lines that set the folders for docker compose and serve.sh.

    Args:
        taken: where the machine has the result of merging, "" if only the user knows, None if the server does
            not need it.
    """
    lines = []
    written = "MODEL_DIR" if server.adapter is None else "ADAPTER_DIR"
    if server.adapter is not None and server.model.kind == "folder" and not server.model.address:
        lines.append(f"export MODEL_DIR={ANY_FOLDER}")
    if taken is not None:
        # docker compose resolves a relative folder from the location of its own file.
        folder = f"{'' if taken.startswith('/') else '$PWD/'}{shell_word(taken)}" if taken else ANY_FOLDER
        lines.append(f"export {written}={folder}")
    return lines


def _by_hand(server: Container, taken: str | None) -> list[dict[str, str]]:
    """Return the disks of k8s.yaml that the user has to fill, each with the source folder for a shell."""
    disks = []
    for volume in server.volumes:
        if volume.kind == "bind":
            name = volume.target.strip("/")
            source = taken if name == ("model" if server.adapter is None else "adapter") else None
            folder = shell_word(source) if source else _next_to(server.name, volume.source)
            disks.append({"name": name, "target": volume.target, "folder": folder})
    return disks


def _next_to(artifact: str, folder: str) -> str:
    """Return a folder of the recipe relative to the artifact's parent folder, as a shell word."""
    if not folder:
        return ANY_FOLDER
    if folder.startswith("~/"):
        return "~/" + shell_word(folder[2:])
    return shell_word(str(PurePosixPath(artifact, folder)))


def _copied(server: Container) -> list[ServedWeights]:
    return [w for w in (server.model, server.adapter) if w is not None and w.kind == "bucket"]
