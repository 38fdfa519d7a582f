"""Write the text of a new recipe: its values, each with a reason from the numbers of model and machine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from recipec.compiler.catalog import is_directory, title
from recipec.compiler.lowering.first_rows import LOOKED_AT
from recipec.compiler.lowering.format_keys import ALONE
from recipec.compiler.lowering.hardware import Accelerator
from recipec.compiler.lowering.sizes import BYTES
from recipec.compiler.new.data_source import PLACEHOLDER, NewData
from recipec.compiler.new.draft import EVERY, JUDGED, RANK, Draft, Pace, dtype
from recipec.compiler.pages.numbers import gib_number, memory_size
from recipec.compiler.wording import listing, plural, quantity, which_layers
from recipec.runtime.model.families import Architecture
from recipec.spec.commented_recipe import Line, recipe_text
from recipec.spec.language import VERSION
from recipec.spec.language.train import default_rate

Lines = dict[str, Line]

HELD_OUT = 0.02
ENOUGH_TO_HOLD_OUT = 50
"""Rows from which on some are held out for evaluation."""

EXAMPLES = {
    "chat": '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}',
    "instruction": '{"instruction": "...", "input": "...", "output": "..."}',
    "prompt_completion": '{"prompt": "...", "completion": "..."}',
    "text": '{"text": "..."}',
    "preference": '{"prompt": "...", "chosen": "...", "rejected": "..."}',
    "unpaired_preference": '{"prompt": "...", "completion": "...", "label": true}',
}
"""An example row of each format."""

HOLDS = {
    "chat": "messages of role and content, rendered with the checkpoint's own chat template",
    "instruction": "instruction, input and output, rendered with the checkpoint's own chat template",
    "prompt_completion": "prompt and completion, which is learned; as text they use no chat template",
    "text": "text, all of which is learned",
    "preference": "prompt, chosen and rejected: a row each for the chosen and the rejected answer",
    "unpaired_preference": "prompt, completion and label, which says whether the completion is desirable",
}
"""A description of a sample in each format."""

METHODS = {
    "lora": "fine-tuned with LoRA",
    "qlora": "fine-tuned with QLoRA",
    "dpo": "tuned on preferences with DPO",
    "kto": "tuned on answers that are desirable or not with KTO",
    "full": "fine-tuned, all of its weights,",
}


@dataclass(frozen=True)
class Contents:
    """The content of a recipe.

    Attributes:
        model: as the recipe names it.
        serve: keys of its `serve` section; {} for no section.
        file: path of the recipe, as the user would type it.
        pace: the length of the run.
    """

    name: str
    model: str
    draft: Draft
    source: NewData
    file: str
    serve: Mapping[str, Any] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)


def write(contents: Contents) -> str:
    """Return the text of the recipe."""
    lines: Lines = {"recipe": Line(VERSION), "name": Line(contents.name)}
    for part in (_model, _mesh, _lora, _data, _train, _rest, _serve):
        lines.update(part(contents))
    return recipe_text(lines, list(_header(contents)))


def _header(c: Contents) -> Iterator[str]:
    served = f", and served on one {c.serve['accelerator']}" if c.serve else ""
    yield f"{_title(c.model)}, {METHODS[c.draft.method]} on one {c.draft.accelerator.name}{served}."
    if c.draft.accelerator.platform == "tpu":
        yield ""
        yield f"{_memory(c)} `recipe plan {c.file}` has the compiler's figures, with the time and the price."
    if c.source.path == PLACEHOLDER and c.source.rows is None:
        yield ""
        yield f"The data does not exist yet: write samples to {PLACEHOLDER} next to this file, one a line:"
        yield f"  {EXAMPLES[c.source.format or 'chat']}"


def _memory(c: Contents) -> str:
    """Say how much memory a step takes by calculation, and that no plan has confirmed it."""
    need = c.draft.need
    takes = f"{gib(need.total)} to {gib(need.most)} GiB of each device's {_available(c)}"
    takes = f"By calculation, a step takes {takes}"
    if c.draft.sure:
        return f"{takes}, which no plan has confirmed yet."
    return (
        f"{takes}. This is the arrangement that needs the least memory, and it may not fit: plan it before "
        "you train."
    )


def _model(c: Contents) -> Lines:
    architecture = c.draft.probe.program.architecture
    numbers = sum(math.prod(parameter.shape) for parameter in c.draft.probe.program.parameters)
    shape = f"{quantity(numbers)} parameters in {plural(architecture.num_layers, 'layer')}"
    lines = {"model.id": Line(c.model, f"{shape}, {_heads(architecture)}")}
    if dtype(c.draft.accelerator) == "float32":
        lines["model.dtype"] = Line("float32", "CPUs are slow at bfloat16")
    if c.draft.quantize:
        lines["model.quantization"] = Line("nf4", _why_quantized(c))
    return lines


def _heads(architecture: Architecture) -> str:
    counts = sorted({architecture.kv_heads(i) for i in range(architecture.num_layers)})
    return f"{plural(architecture.num_heads, 'head')}, {listing(counts, 'or')} of keys and values"


def _mesh(c: Contents) -> Lines:
    d, machine = c.draft, c.draft.accelerator
    if machine.platform == "cpu":
        comment = plural(machine.devices, "virtual device")
    else:
        comment = f"{plural(machine.chips, 'chip')} of {machine.hbm_gib:g} GiB"
        if machine.devices_per_chip > 1:
            comment += f", each {machine.devices_per_chip} devices"
        elif machine.chips != int(machine.name.rpartition("-")[2]):
            comment += f": the {machine.name.rpartition('-')[2]} counts TensorCores"
    fsdp, ep, tp = (d.axes.get(axis, 1) for axis in ("fsdp", "ep", "tp"))
    part = f"1/{fsdp * tp}" if fsdp * tp > 1 else "all"
    share = f"keeps {part} of the weights" if fsdp * tp > 1 else "keeps all weights"
    if ep > 1:
        share = f"keeps 1/{fsdp * ep * tp} of the experts, {part} of the other weights"
    if d.method == "full":
        share += " and their state"
    rows = "each device computes different rows" if d.parallel > 1 else "the device computes all rows"
    if tp > 1:
        rows = f"{tp} devices share each row, since fsdp {fsdp * tp} does not divide the weights or fit"
    return {
        "mesh.accelerator": Line(machine.name, comment),
        "mesh.axes": Line(dict(d.axes), f"{rows} and {share}: {gib(d.need.state)} GiB"),
    }


def _lora(c: Contents) -> Lines:
    program, d, lora = c.draft.probe.program, c.draft, c.draft.probe.program.recipe.lora
    if d.method == "full" or lora is None:
        return {"lora": Line(None, "all weights are trained")}
    numbers = sum(math.prod(parameter.shape) for parameter in program.parameters)
    share = program.trainable_parameters / numbers
    types = program.architecture.layer_types
    every = which_layers(types, range(len(types)))
    reached = f"all projections of {every} layers; LoRA reaches {program.reach}"
    return {
        "lora.rank": Line(RANK, f"{quantity(program.trainable_parameters)} trained numbers, {share:.2%}"),
        "lora.alpha": Line(int(lora.alpha), "the adapters' product counts alpha / rank = 2 times"),
        "lora.targets": Line(lora.targets, reached),
    }


def _why_quantized(c: Contents) -> str:
    numbers = sum(math.prod(parameter.shape) for parameter in c.draft.probe.program.parameters)
    whole = gib(numbers * BYTES["bfloat16"] / math.prod(c.draft.axes.values()))
    asked = f"the base in 4 bits; in bfloat16 it takes about {whole} GiB of each device's {_available(c)}"
    return f"{asked}. Merging adds the adapters to the unquantized weights"


def _data(c: Contents) -> Lines:
    source, d = c.source, c.draft
    format = source.format or "chat"
    seen = "by its columns: " if source.seen else ""
    lines = {
        "data.train": Line([_source(source, part) for part in source.parts]),
        "data.format": Line(format, f"{seen}{HOLDS[format]}"),
    }
    if source.fields:
        lines["data.fields"] = Line(dict(source.fields), "the format's names, and the file's names for them")
    if source.pictures:
        most = f"up to {plural(source.pictures, 'picture')} a sample"
        lines["data.images"] = Line({}, f"{most}, read as the checkpoint's own image processor does")
    if source.rows is None or source.rows >= ENOUGH_TO_HOLD_OUT:
        lines["data.eval_fraction"] = Line(
            HELD_OUT, "share of the samples that is held out, to evaluate the loss on"
        )
    longer = "longer samples are left out, and counted"
    if source.longest is not None:
        whole = all((part.rows or 0) < LOOKED_AT for part in source.parts)
        of_source = " of each" if source.others else ""
        of = "the rows" if whole else f"the first {LOOKED_AT} rows{of_source}"
        longer = f"the longest of {of} has about {plural(source.longest, 'token')}; {longer}"
        if source.longest > d.length == d.probe.positions:
            longer = f"the model's positions; {longer}"
    if format not in ALONE:
        longer = f"short samples share rows, kept apart; {longer}"
    lines["data.max_length"] = Line(d.length, longer)
    return lines


def _source(first: NewData, part: NewData) -> dict[str, Any]:
    """Return an entry of data.train: its path, and what differs from the first source."""
    entry: dict[str, Any] = {"path": part.path}
    if part.format is not None and part.format != first.format:
        entry["format"] = part.format
    if dict(part.fields) != dict(first.fields):
        entry["fields"] = dict(part.fields)
    return entry


def _train(c: Contents) -> Lines:
    d = c.draft
    lines: Lines = {}
    if d.method in JUDGED.values():
        lines["train.objective"] = Line(d.method)
        lines["train.beta"] = Line(0.1, "how closely to stay to the model that training starts from")
    unit = "pair" if d.method == "dpo" else "row"
    rows = plural(d.micro, unit)
    accumulated = f" x {d.accumulation} accumulated micro-batches" if d.accumulation > 1 else ""
    on = f" on {plural(d.parallel, 'device' if d.axes['tp'] == 1 else 'group of devices')}"
    lines["train.epochs"] = Line(c.pace.epochs, c.pace.words)
    lines["train.global_batch_size"] = Line(d.rows, f"{unit}s a step: {rows}{on}{accumulated}")
    lines["train.micro_batch_size"] = Line(d.micro)
    if "data.eval_fraction" in _data(c) and c.pace.every != EVERY:
        lines["train.eval_every"] = Line(c.pace.every)
    rate = default_rate(d.method == "full", d.method if d.method in JUDGED.values() else "sft")
    lines["train.optimizer.learning_rate"] = Line(rate)
    if c.source.rows is not None and c.source.rows < LOOKED_AT:
        lines["train.schedule.warmup_steps"] = Line(0, "too few steps for a warm-up")
    lines["remat.policy"] = Line(d.policy, d.choice.reason)
    return lines


def _rest(c: Contents) -> Lines:
    lines: Lines = {}
    if c.draft.accelerator.platform == "tpu":
        lines["checkpoint.directory"] = Line("checkpoints", "gs://bucket/folder outlives the machine")
        if c.draft.accelerator.hosts > 1:
            where = "name your bucket: every host writes there"
            lines["checkpoint.directory"] = Line(f"gs://my-bucket/{c.name}", where)
    if c.pace.every != EVERY:
        lines["checkpoint.every_steps"] = Line(c.pace.every)
    if dtype(c.draft.accelerator) == "float32":
        lines["merge.dtype"] = Line("float32")
    return lines


REASONS = {
    "tensor_parallel_size": "devices that each copy of the model is split over",
    "data_parallel_size": "copies, each with its own requests",
    "max_model_len": "prompt and answer together, in tokens",
    "kv_cache_dtype": "half of bfloat16's cache: twice as many requests at once",
    "decode_block_sizes": "fewer reads by calculation: measure with serve/bench.sh",
}
"""Comments for the keys of `serve`."""


def _serve(c: Contents) -> Lines:
    reasons = REASONS if c.serve.get("kv_cache_dtype") != "auto" else REASONS | {"kv_cache_dtype": _no_fp8(c)}
    return {f"serve.{key}": Line(value, reasons.get(key, "")) for key, value in c.serve.items()}


def _no_fp8(c: Contents) -> str:
    return f"{str(c.serve['accelerator']).partition('-')[0]} has no fp8"


def _title(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2] if is_directory(model) else title(model)


def _available(c: Contents) -> str:
    return available(c.draft.accelerator)


def gib(size: float) -> str:
    """Write GiB without the unit: "22.4". Estimates are not more precise."""
    return gib_number(size, 1)


def available(accelerator: Accelerator) -> str:
    """Write the memory of a device: "31.25 GiB"."""
    return f"{memory_size(accelerator.hbm_bytes_per_device)} GiB"
