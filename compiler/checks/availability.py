"""What the language can say and this version does not do yet: never left out silently."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from compiler.checks.paths import escapes
from compiler.facts import Facts
from spec.diagnostics import Diagnostic

SPLASH_BLOCK = 512
"""Splash attention's block of tokens: a row has to be a multiple of it."""


def check(facts: Facts) -> Iterator[Diagnostic]:
    yield from _training(facts)
    yield from _attention(facts)
    yield from _data(facts)
    yield from _merge(facts)
    yield from _unused(facts)


def _training(facts: Facts) -> Iterator[Diagnostic]:
    recipe, accelerator = facts.recipe, facts.accelerator
    if recipe.lora is None:
        yield Diagnostic(
            "E0901",
            "the recipe has no `lora` section, which means full fine-tuning, and this version trains "
            "adapters alone",
            "",
            "add a lora section, for example `lora: {rank: 16}`",
        )
    elif recipe.lora.quantize is not None:
        yield Diagnostic(
            "E0905",
            f"lora.quantize {recipe.lora.quantize}: quantised base weights are not in this version",
            "lora.quantize",
            "quantize: null",
        )
    hosts = max(recipe.mesh.hosts, accelerator.hosts if accelerator else 1)
    if hosts > 1:
        path = (
            "mesh.hosts"
            if recipe.mesh.hosts > 1
            else ("mesh.topology" if recipe.mesh.topology else "mesh.accelerator")
        )
        named = recipe.mesh.topology or recipe.mesh.accelerator
        what = f"`{named}` is {hosts} hosts" if recipe.mesh.hosts == 1 else f"hosts: {hosts}"
        yield Diagnostic(
            "E0902",
            f"{what}, and training on several hosts is not in this version",
            path,
            "choose a slice of one host, such as v5p-8, v6e-8 or v5e-8, and hosts: 1",
        )
    if recipe.train.optimizer.name != "adamw":
        yield Diagnostic(
            "E0913",
            f"the optimizer {recipe.train.optimizer.name} is not in this version",
            "train.optimizer.name",
            "name: adamw",
        )
    if recipe.train.log.wandb_project is not None:
        yield Diagnostic(
            "E0911",
            "reporting to Weights & Biases is not in this version",
            "train.log.wandb_project",
            "wandb_project: null; metrics.jsonl and TensorBoard files are written (log.tensorboard)",
        )


def _attention(facts: Facts) -> Iterator[Diagnostic]:
    recipe, accelerator = facts.recipe, facts.accelerator
    if recipe.model.attention != "splash":
        return
    if accelerator is not None and accelerator.platform != "tpu":
        yield Diagnostic(
            "E0903",
            f"splash attention is a kernel of the TPU, and {accelerator.name} is a CPU",
            "model.attention",
            "attention: dot",
        )
    if facts.model is not None and not facts.model.family.flash_attention:
        yield Diagnostic(
            "E0903",
            f"Tunix's model of {facts.model.title} has no splash attention",
            "model.attention",
            "attention: dot",
        )
        return
    if recipe.data.packing:
        yield Diagnostic(
            "E0904",
            "splash attention sees no borders between packed samples in this version: each would attend to "
            "the ones before it",
            "model.attention",
            "attention: dot, or packing: false (rows are then padded on the right, which splash attention "
            "bears)",
        )
    if recipe.data.max_length % SPLASH_BLOCK:
        below = max(1, recipe.data.max_length // SPLASH_BLOCK) * SPLASH_BLOCK
        yield Diagnostic(
            "E0412",
            f"splash attention works on blocks of {SPLASH_BLOCK} tokens, and max_length "
            f"{recipe.data.max_length} is no multiple of that",
            "data.max_length",
            f"max_length: {below} or {below + SPLASH_BLOCK}",
        )


def _data(facts: Facts) -> Iterator[Diagnostic]:
    data = facts.recipe.data
    if data.transform is not None:
        yield Diagnostic(
            "E0906",
            "data.transform is not in this version",
            "data.transform",
            "apply the function beforehand and name the resulting JSON-lines file",
        )
    if data.format != "chat":
        yield Diagnostic(
            "E0907",
            f"the data format {data.format} is not in this version",
            "data.format",
            'format: chat, with rows such as {"messages": [{"role": "user", "content": ...}, '
            '{"role": "assistant", "content": ...}]}',
        )
    if data.loss_on == "completion":
        yield Diagnostic(
            "E0910",
            "loss_on completion belongs to the format prompt_completion, which is not in this version",
            "data.loss_on",
            "loss_on: assistant or last_assistant",
        )
    for part, sources in (("train", data.train), ("eval", data.eval)):
        for index, source in enumerate(sources):
            where = f"data.{part}[{index}]"
            scheme = source.path.partition("://")[0] if "://" in source.path else ""
            if scheme not in ("", "gs") or (not source.path.endswith(".jsonl") and not escapes(source.path)):
                yield Diagnostic(
                    "E0908",
                    f"`{source.path}` is not a source that this version reads",
                    f"{where}.path",
                    "convert it to JSON lines: a file that ends in .jsonl, local or gs://",
                )
            if source.weight != 1.0:
                yield Diagnostic(
                    "E0909",
                    f"weight {source.weight:g}: mixing sources by weight is not in this version",
                    f"{where}.weight",
                    "remove it: every row of every file is used once an epoch",
                )


def _merge(facts: Facts) -> Iterator[Diagnostic]:
    merge = facts.recipe.merge
    if "://" in merge.output:
        yield Diagnostic(
            "E0917",
            f"`{merge.output}`: merging straight into a bucket is not in this version",
            "merge.output",
            "output: merged, and copy the folder to the bucket afterwards",
        )
    if merge.max_shard_size != type(merge)().max_shard_size:
        yield Diagnostic(
            "N0918",
            "max_shard_size has no effect in this version: the merged weights keep the base's split into "
            "files",
            "merge.max_shard_size",
        )


def _unused(facts: Facts) -> Iterator[Diagnostic]:
    recipe = facts.recipe
    if recipe.serve is not None and recipe.serve.weights == "adapter":
        yield Diagnostic(
            "E0912",
            "serving the base with the adapter beside it is not in this version",
            "serve.weights",
            "weights: merged",
        )
    unused = [name for name in ("benchmark", "evaluate", "cost") if _differs(getattr(recipe, name))]
    unused += ["launch.kind"] if recipe.launch.kind != type(recipe.launch)().kind else []
    for name in unused:
        message = f"this version makes nothing from `{name}`: it is recorded in recipe.lock.json alone"
        yield Diagnostic("N0916", message, name)


def _differs(section: Any) -> bool:
    """Whether anything in it is not the default."""
    return bool(section != type(section)())
