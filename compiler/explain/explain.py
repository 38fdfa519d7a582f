"""`recipe explain`: show each value, where it comes from, and what it turns into.

`summary` says in a few lines what a section of the recipe means. `detail` says everything that is known about
a path. The tables at the end of this file list the functions for each section.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from recipec.compiler import catalog
from recipec.compiler.catalog.added import LOCK
from recipec.compiler.explain import reinforcement
from recipec.compiler.explain.loss import additions, objective, rounding
from recipec.compiler.lowering.assumed_pictures import row_patches
from recipec.compiler.lowering.facts import short_name
from recipec.compiler.lowering.libtpu import flags
from recipec.compiler.lowering.run_length import held_out, run_length, warmup_steps
from recipec.compiler.lowering.runtime_settings import SETTINGS
from recipec.compiler.lowering.sizes import BYTES, needs_master_weights
from recipec.compiler.pages.document import Block, Document, Items, Table, Text, sheet
from recipec.compiler.pages.numbers import gib_number
from recipec.compiler.roofline import training_step
from recipec.compiler.roofline.step_estimate import mask_of_pictures
from recipec.compiler.vllm.device_memory import weight_size
from recipec.compiler.wording import (
    KINDS,
    grouped,
    listing,
    plural,
    quantity,
    ranges,
    split_layer,
    which_layers,
)
from recipec.runtime.model.adapters import Adapter, arrays_of
from recipec.runtime.model.families.family import Spec
from recipec.runtime.model.partition_rules import DATA, TOKENS, shards
from recipec.runtime.training.objectives import OBJECTIVES
from recipec.spec.codes import Code
from recipec.spec.core_schema import flow
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.key_paths import Part, join, split
from recipec.spec.language import Section
from recipec.spec.structure import choices_of, field_at

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program
    from recipec.spec.language import Data, Optimizer, Section
    from recipec.spec.load import Loaded


def explain(program: Program, loaded: Loaded, path: str | None = None) -> Document:
    """Return what the command prints.

    Args:
        program: the recipe's program.
        loaded: the same recipe with the sources of its values.
        path: a section or key to explain in full; None for a summary of the whole recipe.
    """
    if path is None:
        return _whole(program, loaded)
    parts = split(path)
    values = [(p, v) for p, v in leaves(program.recipe) if p[: len(parts)] == parts]
    blocks: list[Sequence[Block]] = [[_values(values, program, loaded)], _choices(parts)]
    sections = sheet("", *filter(None, [*blocks, *detail(parts, program)])).sections
    return Document(path, sections, sentence=_described(program.recipe, parts))


E0040 = Code(
    "E0040",
    "no such path",
    cause="The path given to `recipe explain` is not a section or key of the language.",
    cure="Use the path that the message suggests. Without a path the command shows the whole recipe.",
)


def unknown_path(path: str, loaded: Loaded) -> Diagnostic | None:
    """Return what is wrong with a path that a user asks about, None if it names a section or key."""
    recipe = loaded.recipe
    if recipe is None:
        return None
    known: dict[str, None] = {}
    for parts, _ in leaves(recipe):
        for end in range(1, len(parts) + 1):
            known.setdefault(join(parts[:end]))
    if path in known:
        return None
    try:
        first = split(path)[:1]
    except ValueError:
        first = ()
    absent = [name for name in ("lora", "serve") if first == (name,) and getattr(recipe, name) is None]
    if absent:
        return Diagnostic(
            E0040,
            f"the recipe has no section `{absent[0]}`",
            "",
            f"add it: `recipe schema` lists the keys of {absent[0]}",
        )
    close = get_close_matches(path, list(known), n=1, cutoff=0.4)
    last = re.split(r"[.\[]", path)[-1]
    ending = [name for name in known if name.rpartition(".")[2] == last]
    near = ending[:1] or close
    help = f"did you mean `{near[0]}`?" if near else f"sections are {', '.join(type(recipe).model_fields)}"
    return Diagnostic(E0040, f"`{path}` is not a section or key of the recipe", "", help)


def leaves(section: Section, above: tuple[Part, ...] = ()) -> Iterator[tuple[tuple[Part, ...], Any]]:
    """Yield every value of a recipe with its path, in the order of the language. A list of plain values is
    one value."""
    for name in type(section).model_fields:
        value, path = getattr(section, name), (*above, name)
        if isinstance(value, Section):
            yield from leaves(value, path)
        elif isinstance(value, list) and value and isinstance(value[0], Section):
            for index, item in enumerate(value):
                yield from leaves(item, (*path, index))
        elif isinstance(value, dict) and value:
            for key, item in value.items():
                yield (*path, key), item
        else:
            yield path, value


def _whole(program: Program, loaded: Loaded) -> Document:
    sections: dict[str, list[tuple[tuple[Part, ...], Any]]] = {}
    for parts, value in leaves(program.recipe):
        # recipe, name and extends make one block.
        sections.setdefault(str(parts[0]) if len(parts) > 1 else "", []).append((parts, value))
    blocks: list[Sequence[Block]] = [
        [_values(values, program, loaded), Items(summary(name, program))] for name, values in sections.items()
    ]
    return sheet("", *blocks)


def _values(values: Sequence[tuple[tuple[Part, ...], Any]], program: Program, loaded: Loaded) -> Table:
    """Return the paths with their values, and where these come from."""
    paths = [(join(parts), value) for parts, value in values]
    rows = [(path, flow(value), _origin(path, program, loaded)) for path, value in paths]
    return Table((), rows, words=(1, 2))


def _origin(path: str, program: Program, loaded: Loaded) -> str:
    """Return where a value comes from: for the commit of an added model its lock, and for `auto` the
    reason too."""
    lock = _lock(program) if path == "model.revision" else None
    origin = lock or str(loaded.sources.origin(path))
    reason = program.automatic.get(path)
    return origin if reason is None else f"{origin}, auto: {reason}"


def _lock(program: Program) -> str | None:
    """Return the path of an added model's lock, where model.revision comes from; None for any other model."""
    if program.model_origin == "catalog" or catalog.is_directory(program.recipe.model.id):
        return None
    return program.model_origin.replace("config.json", LOCK)


def _described(recipe: Any, parts: tuple[Part, ...]) -> str:
    """Return the schema's description of a path."""
    node, text = recipe, ""
    for part in parts:
        if isinstance(node, Section) and isinstance(part, str):
            text = type(node).model_fields[part].description or ""
            node = getattr(node, part)
        elif isinstance(node, list) and isinstance(part, int):
            node = node[part]
    return text


def _choices(parts: tuple[Part, ...]) -> list[Block]:
    """Return the words that a key takes, each with its meaning; nothing for other keys."""
    field = field_at(parts)
    words = choices_of(field.annotation)[0] if field else []
    extra = field.json_schema_extra if field else None
    meanings = extra.get("x-choices") if isinstance(extra, dict) else None
    meanings = meanings if isinstance(meanings, dict) else {}
    rows = [(word, str(meanings.get(word, ""))) for word in words]
    return [Table(("choice", "meaning"), rows, words=(1,))] if rows else []


def summary(section: str, program: Program) -> list[str]:
    """Describe in a few lines what a section of the recipe means."""
    return SUMMARIES[section](program) if section in SUMMARIES else []


def detail(parts: Sequence[Part], program: Program) -> list[Sequence[Block]]:
    """Return everything that is known about a path of the recipe, as blocks by topic."""
    section = str(parts[0])
    if section == "train" and len(parts) > 1:
        sentences = TRAIN_DETAILS.get(str(parts[1]), _batches)(program)
    else:
        sentences = summary(section, program)
    return [[*map(Text, sentences)], *(DETAILS[section](program) if section in DETAILS else [])]


def _model(program: Program) -> list[str]:
    a, recipe = program.architecture, program.recipe
    layers = {
        name: [i for i, kind in enumerate(a.layer_types) if kind == value] for value, name in KINDS.items()
    }
    present = {name: numbers for name, numbers in layers.items() if numbers}
    kv = listing(f"{a.kv_heads(numbers[0])} in {name} layers" for name, numbers in present.items())
    origin = "the catalog" if program.model_origin == "catalog" else program.model_origin
    if _lock(program):
        origin += f", added from the hub at commit {recipe.model.revision}"
    size = program.base_parameters * BYTES[recipe.model.dtype]
    out = [
        f"{catalog.title(recipe.model.id)}, family {program.family.name}; its sizes are from {origin}",
        f"{a.num_layers} layers ({listing(f'{len(n)} {name}' for name, n in present.items())}), hidden size "
        f"{a.hidden_size:,}, {a.num_heads} attention heads, key/value heads {kv}",
        f"{program.base_parameters:,} base parameters ({quantity(program.base_parameters)}), "
        f"{gib_number(size, 1)} GiB in {recipe.model.dtype}; "
        f"{'all are trained' if program.lora is None else 'they stay frozen'}",
        f"dtype is set for loading, parameters and computation: {recipe.model.dtype} in all three",
    ]
    if recipe.model.quantization is not None:
        out.append(f"the weights of linear layers and experts are stored in {recipe.model.quantization}")
    if recipe.model.quantized_matmul is not None:
        out.append(f"products with the frozen weights are in {product_types(program)}{_rates(program)}")
        out.append("activations are rounded row by row: docs/numerics.md says what that costs in quality")
    if recipe.model.vocab_size is not None:
        out.append(
            f"the embedding and the head have {recipe.model.vocab_size:,} rows; rows that the "
            "checkpoint does not have start as the mean of its rows"
        )
    if len(present.get("global", ())) and len(present) > 1:
        out.append(f"global layers: {ranges(present['global'])}")
    return [*out, *_tower(program)]


def _tower(program: Program) -> list[str]:
    """Describe the vision tower, and what pictures cost by calculation."""
    vision, patches = program.architecture.vision, row_patches(program)
    if vision is None or not patches:
        return []
    size = sum(math.prod(parameter.shape) for parameter in vision.parameters())
    layers = vision.layers
    parts = "a projector" if layers is None else f"a vision tower of {layers.count} layers and its projector"
    tokens = training_step.rows(program) * program.recipe.data.max_length
    share = training_step.tower_flops(program) / training_step.model_flops(program, tokens)
    frozen = "which are frozen"
    if (count := len(program.tower_adapters)) > 0:
        frozen = f"of which {plural(count, 'linear layer')} have adapters"
    return [
        f"{size:,} of the base parameters ({quantity(size)}) are {parts} for pictures, {frozen}",
        f"with room for {patches:,} patches a row, they take {share:.0%} of a step's FLOPs (an estimate)",
        *([] if (mask := mask_of_pictures(program)) is None else [str(mask)]),
    ]


def _mesh(program: Program) -> list[str]:
    accelerator, axes = program.accelerator, program.recipe.mesh.axes
    out = [accelerator.describe()]
    if accelerator.bf16_tflops is not None:
        out.append(
            f"{accelerator.bf16_tflops * accelerator.chips:,.0f} TFLOP/s in bfloat16 at most, all chips"
        )
    if accelerator.usd_per_chip_hour is not None:
        price = accelerator.usd_per_chip_hour * accelerator.chips
        out.append(f"list price US$ {price:.2f} an hour (on demand, as of {accelerator.price_date})")
    over = " x ".join(axis for axis in DATA if axis in axes)
    out.append(
        f"{plural(program.data_parallel, 'data-parallel device')} ({over}); heads and features split over "
        f"{plural(axes['tp'], 'device')} (tp)"
    )
    if TOKENS in axes:
        out.append(f"the tokens of a row, and with fsdp the weights, split over {axes[TOKENS]} devices (cp)")
    room = f" of {accelerator.hbm_gib / accelerator.devices_per_chip:g}" if accelerator.hbm_gib else ""
    out.append(f"base weights take {gib_number(weight_bytes(program))}{room} GiB of each device")
    return out


def weight_bytes(program: Program) -> float:
    """Return the bytes of base weights on one device."""
    size, axes = BYTES[program.recipe.model.dtype], program.recipe.mesh.axes
    return sum(size * math.prod(_local_shape(p.shape, p.spec, axes)) for p in program.parameters)


def _local_shape(shape: Sequence[int], spec: Spec, axes: dict[str, int]) -> tuple[int, ...]:
    """Return the shape of the part of an array that one device holds."""
    return tuple(n // shards(axis, axes) for n, axis in zip(shape, spec, strict=True))


def _shardings(program: Program) -> list[Sequence[Block]]:
    """Return the PartitionSpec of every parameter and adapter, one row for all layers with the same one."""
    groups: dict[tuple[str, tuple[int, ...], Spec], list[str]] = {}
    arrays = [(p.path, p.shape, p.spec) for p in program.parameters]
    arrays += [(p.path, p.shape, p.spec) for p in program.token_rows]
    arrays += [(path, shape, spec) for path, (shape, spec) in arrays_of(program.adapters).items()]
    for path, shape, spec in arrays:
        groups.setdefault((split_layer(path)[0], shape, spec), []).append(path)
    axes, rows = program.recipe.mesh.axes, []
    order = list(dict.fromkeys(pattern for pattern, _, _ in groups))
    defaults = {p.path: p.spec for p in program.family.parameters(program.architecture)}
    for pattern, shape, spec in sorted(groups, key=lambda key: order.index(key[0])):
        paths = groups[pattern, shape, spec]
        layers = next(iter(grouped(paths).values()))
        changed = " (changed)" if paths[0] in defaults and defaults[paths[0]] != spec else ""
        rows.append(
            [
                pattern.replace("{}", "*"),
                _layers(program, layers),
                _shape(shape),
                f"P({', '.join(repr(axis) if axis else 'None' for axis in spec)}){changed}",
                _shape(_local_shape(shape, spec, axes)),
            ]
        )
    head = ("parameter", "layers", "shape", "PartitionSpec", "on a device")
    return [[Table(head, rows, words=(1, 2, 3, 4))]]


def _layers(program: Program, layers: Sequence[int]) -> str:
    return which_layers(program.architecture.layer_types, layers) if layers else ""


def _lora(program: Program) -> list[str]:
    lora = program.lora
    if lora is None:
        return []
    trained = program.trainable_parameters
    arrays = len(arrays_of(program.adapters))
    out = [
        f"{trained:,} trained parameters ({trained / program.base_parameters:.2%} of the base's) in "
        f"{arrays:,} arrays, {scales(program)}",
        f"LoRA reaches {program.reach}",
        f"adapters and optimizer state in {lora.dtype}: "
        f"{gib_number(3 * trained * BYTES[lora.dtype])} GiB over all devices",
    ]
    if whole := [parameter for parameter in program.whole if parameter not in program.token_rows]:
        modules = dict.fromkeys(split_layer(source.module)[0] for p in whole for source in p.sources)
        names = listing(module.replace("{}", "*") for module in modules)
        out.append(f"of these {sum(math.prod(p.shape) for p in whole):,} are of {names}, trained whole")
    for rows in program.token_rows:
        count, tied = rows.shape[0], all(p.path != "lm_head.w" for p in program.parameters)
        head = "which the output head uses too" if tied else "not of the output head"
        out.append(f"of these {math.prod(rows.shape):,} are {plural(count, 'row')} of the embedding, {head}")
    if lora.start_from:
        out.append(f"training begins with the adapter {lora.start_from}, with a new optimizer, at step 0")
    if lora.principal:
        part = "what nf4 loses of it" if lora.init == "loftq" else "a part of it, without which it is frozen"
        out.append(f"{lora.init}: a weight's adapter starts as {part}")
        out.append("merge writes an adapter of twice the rank, for the unchanged base")
    return out


def stored_type(program: Program) -> str:
    """Return the type in which the frozen weights of linear layers are stored."""
    return program.recipe.model.quantization or program.recipe.model.dtype


def product_types(program: Program) -> str:
    """Return the types of the products with frozen weights: forward, and for the gradient of the
    activations."""
    model = program.recipe.model
    if model.quantized_matmul is None:
        return model.dtype
    backward = "forward and backward" if model.quantized_matmul == "both" else f"backward in {model.dtype}"
    return f"{model.quantization}, {backward}"


def _rates(program: Program) -> str:
    """Describe the peak rates of 8-bit and of bfloat16 products, "" if the accelerator's are not known."""
    accelerator = program.accelerator
    if accelerator.eight_bit_tflops is None:
        return ""
    return (
        f": at most {accelerator.eight_bit_tflops:,} TFLOP/s a chip, in place of bfloat16's "
        f"{accelerator.bf16_tflops:,}"
    )


def scales(program: Program) -> str:
    """Describe the factors that the adapters' products are multiplied by."""
    by = "sqrt(rank)" if program.lora and program.lora.rslora else "rank"
    factors = sorted({adapter.scale for adapter in program.adapters})
    return f"scale alpha / {by} = {listing(f'{factor:g}' for factor in factors)}"


def _adapters(program: Program) -> list[Sequence[Block]]:
    """Return Tunix's names and the number of parameters for each target."""
    rows: list[list[str]] = []
    totals: dict[str, int] = {}
    groups: dict[tuple[str, str, tuple[int, ...], tuple[int, ...]], list[Adapter]] = {}
    for adapter in program.adapters:
        leaf = split_layer(adapter.target.weight)[0].replace("{}", "*")
        name = _target_name(adapter)
        groups.setdefault((name, leaf, adapter.a_shape, adapter.b_shape), []).append(adapter)
    order = list(dict.fromkeys(name for name, *_ in groups))
    for key in sorted(groups, key=lambda key: order.index(key[0])):
        name, leaf, a_shape, b_shape = key
        members = groups[key]
        first = members[0]
        count = sum(_size(adapter) for adapter in members)
        totals[name] = totals.get(name, 0) + count
        shared = " (A shared)" if first.shared else ""
        rows.append(
            [
                name,
                leaf,
                _layers(program, [layer for a in members if (layer := a.target.layer) is not None]),
                f"{_shape(a_shape)} x {_shape(b_shape)}{shared}",
                f"{count:,}",
            ]
        )
    arrays = Table(("target", "weight", "layers", "lora_a x lora_b", "trained"), rows, words=(1, 2, 3))
    targets = Table(("target", "in all"), [(name, f"{count:,}") for name, count in totals.items()])
    both = sum(totals.values()) - program.trainable_parameters
    twice = f"an A that projections share is counted for each of them: {both:,} of these twice"
    return [[arrays], [targets, *([Text(twice)] if both else [])]]


def _size(adapter: Adapter) -> int:
    """Return the number of parameters that serve a projection, with an A that it shares."""
    return sum(math.prod(shape) for _, shape, _ in adapter.arrays)


def _target_name(adapter: Adapter) -> str:
    """Return a recipe's name for a projection."""
    target, last = adapter.target, adapter.name.rpartition(".")[2]
    if not target.words:
        return short_name(target)
    return f"{target.words[0]}.{last}" if target.experts else target.words[0]


def _remat(program: Program) -> list[str]:
    return [
        {
            "none": "every activation is stored for the backward pass: fastest, and the most memory",
            "block": "attention and feed-forward blocks are computed again in the backward pass",
            "decoder": "each decoder layer is computed again in the backward pass: the least memory",
            "save_attention": "each decoder layer is computed again in the backward pass, but for its "
            "attention, whose result is stored",
            "save_dots": "the results of projections and attention are stored, and the rest is computed "
            "again in the backward pass",
            "offload_dots": "the results of projections and attention wait in the host's memory for the "
            "backward pass, and the rest is computed again",
        }[program.recipe.remat.policy]
    ]


def _xla(program: Program) -> list[str]:
    names = flags(program)
    if not names:
        return [
            "the compiler's defaults: every gather of weights is done before the product that needs it begins"
        ]
    return [f"libtpu compiles the step with {plural(len(names), 'flag')}: {' '.join(names)}"]


def _data(program: Program) -> list[str]:
    data, train = program.recipe.data, program.recipe.train
    local = run_length(program.recipe, program.source.parent).data
    out = []
    if local is not None:
        out.append(f"{plural(local.rows, 'row')} at hand, of {local.lengths()}")
    if data.eval_fraction is not None:
        number = f": {held_out(data.eval_fraction, local.rows):,} of those at hand" if local else ""
        out.append(
            f"{data.eval_fraction:.3g} of the rows are held out to evaluate on{number}; datasets' "
            f"train_test_split chooses them with the seed {data.eval_seed}"
        )
    fill = "several samples in each" if data.packing else "one sample in each, padded"
    if train.grpo is not None:
        fill = "a prompt and its completion in each, padded"
    out.append(
        f"an optimizer step is {plural(train.global_batch_size, 'row')} of {data.max_length:,} tokens, {fill}"
    )
    out += _sources(data)
    if data.reasoning is not None:
        out.append(f"the assistant's reasoning: {REASONING[data.reasoning]}")
    if data.special_tokens == "text":
        out.append("the texts of control tokens in the data are tokenized as ordinary text")
    fates = {data.of(source).overlong for source in (*data.train, *data.eval)}
    long = listing((OVERLONG[fate] for fate in OVERLONG if fate in fates), "or")
    out.append(f"samples longer than {data.max_length:,} tokens are {long}; `train.py` reports how many")
    return out


OVERLONG = {
    "drop": "left out",
    "truncate": "cut",
    "error": "an error",
    "split": "split into samples of that length",
}

REASONING = {
    "keep": "kept and trained on in each learned turn; samples are left out if the template does not write "
    "it",
    "drop": "removed before the template is applied",
    "empty": "removed, and the last turn follows the prompt that switches thinking off",
}


def _stream(data: Data, window: int) -> str:
    total = sum(source.weight for source in data.train)
    shares = listing(f"{source.weight / total:.0%} of {source.path}" for source in data.train)
    drawn = f", drawn {shares}" if len(data.train) > 1 else ""
    return (
        f"streamed: {plural(window, 'sample')} at a time are read{drawn}, shuffled and packed; a source that "
        "ends starts again; a resumed run reads one window again"
    )


def _sources(data: Data) -> list[str]:
    """Describe how the sources are mixed, limited, read and transformed."""
    out = []
    if any(source.weight != 1.0 for source in data.train):
        shares = listing(f"{source.weight:g} x the rows of {source.path}" for source in data.train)
        if data.stream_window is None:
            out.append(f"an epoch has {shares}")
    if data.stream_window is not None:
        out.append(_stream(data, data.stream_window))
    if data.temperature is not None:
        power = f"to the power of 1 / {data.temperature:g}"
        out.append(f"an epoch draws of each source in proportion to its samples {power}")
    if data.curriculum is not None:
        out.append("each epoch goes from its shortest rows to its longest")
    for source in (*data.train, *data.eval):
        if source.limit is not None:
            out.append(f"of {source.path} only the first {plural(source.limit, 'row')}")
    for source in (*data.train, *data.eval):
        values = (source.format, source.loss_on, source.fields, source.chat_template)
        if any(value is not None for value in values):
            held = data.of(source)
            renamed = f", renamed by {flow(held.fields)}" if held.fields else ""
            written = held.chat_template if source.chat_template is not None else None
            whose = "its own template" if "{" in (written or "") else written
            by = "" if written is None else f", written by {whose}"
            out.append(
                f"{source.path} holds {held.format} samples{renamed}{by}, with loss on {flow(held.loss_on)}"
            )
    for source in (*data.train, *data.eval):
        if source.overlong is not None:
            out.append(f"too long samples of {source.path} are {OVERLONG[source.overlong]}")
    for place, transform in data.transforms.items():
        whose = "each row" if place == "data.transform" else f"each row of {place.removesuffix('.transform')}"
        out.append(f"{whose} is passed to {transform}, which is copied into the artifact and locked")
    return out


def _train(program: Program) -> list[str]:
    return [
        *objective(program),
        *_only(program),
        *_batches(program),
        *_length(program),
        *_evaluations(program),
        *_chain(program),
    ]


def _only(program: Program) -> list[str]:
    """Describe what train.trainable_modules leaves to be trained."""
    if not program.recipe.train.trainable_modules:
        return []
    chosen = [parameter for parameter in program.parameters if parameter.trainable]
    modules = dict.fromkeys(split_layer(source.module)[0] for p in chosen for source in p.sources)
    trained = program.trainable_parameters
    return [
        f"{trained:,} trained parameters ({trained / program.base_parameters:.2%} of the model's), of "
        f"{listing(module.replace('{}', '*') for module in modules)}",
        "the optimizer has state only for these; checkpoints hold all weights",
    ]


MEANS = {
    "": "mean over all target tokens",
    "preference": "mean over all pairs",
    "unpaired_preference": "mean over all answers",
    "prompt": "weighted sum over all completion tokens",
}
"""How a step adds up its loss, by the format that an objective learns from."""


def _batches(program: Program) -> list[str]:
    train, data = program.recipe.train, program.recipe.data
    room = train.global_batch_size * data.max_length
    over = " x ".join(axis for axis in DATA if axis in program.recipe.mesh.axes)
    return [
        f"micro_batch_size {train.micro_batch_size} x {over} {program.data_parallel} = "
        f"{plural(program.micro_batch_rows, 'row')} a micro-batch, {_micro_batches(program)} a step: "
        f"{plural(train.global_batch_size, 'row')}, {room:,} tokens of room",
        {
            "tokens": f"the loss is the {MEANS[OBJECTIVES[train.objective].format]} of a step",
            "micro_batches": "the loss is the mean of the micro-batches' means",
        }[train.loss_normalization],
        *additions(train),
        *rounding(program),
    ]


def _micro_batches(program: Program) -> str:
    count = program.accumulation_steps
    return "1 micro-batch" if count == 1 else f"{count:,} micro-batches"


def _evaluations(program: Program) -> list[str]:
    stopping, samples = program.recipe.train.early_stopping, program.recipe.train.generations
    out = []
    if stopping is not None:
        grpo = program.recipe.train.grpo is not None
        better = "reward is not above the highest" if grpo else "loss is not below the lowest"
        less = f" by more than {stopping.min_delta:g}" if stopping.min_delta else ""
        out.append(
            f"it ends early after {plural(stopping.patience, 'evaluation')} in a row whose "
            f"{better} before{less}"
        )
    if samples is not None:
        out.append(
            f"at each evaluation the prompts of {samples.prompts} are answered, with at most "
            f"{plural(samples.max_tokens, 'token')} each"
        )
    return out


def _length(program: Program) -> list[str]:
    recipe = program.recipe
    length = run_length(recipe, program.source.parent)
    per_step = recipe.train.global_batch_size * recipe.data.max_length
    counted = (
        "steps = epochs x rows that are kept / global_batch_size, each epoch rounded up; train.py counts "
        "them as it starts"
    )
    if length.steps is None:
        return [counted]
    if length.exact:
        tokens = length.steps * per_step
        return [f"{length.words()}, at most {tokens:,} tokens ({quantity(tokens)})"]
    at_hand = length.data.rows if length.data else 0
    rows = plural(at_hand - held_out(recipe.data.eval_fraction, at_hand), "row")
    return [f"{length.words()} of at most {per_step:,} tokens, from {rows} at hand", counted]


def _schedule(program: Program) -> list[str]:
    train = program.recipe.train
    schedule, peak = train.schedule, train.optimizer.learning_rate
    length = run_length(program.recipe, program.source.parent)
    if schedule.warmup_ratio is not None:
        warm = f"ceil({schedule.warmup_ratio:g} x steps) steps"
        if length.exact and length.steps is not None:
            warm = plural(warmup_steps(program.recipe, length.steps), "step")
    else:
        warm = plural(schedule.warmup_steps or 0, "step")
    has_warmup = bool(schedule.warmup_ratio or schedule.warmup_steps)
    start = f"from 0 to {peak:g} in {warm}, then " if has_warmup else f"from {peak:g}, "
    decay = {
        "constant": "constant",
        "cosine": f"on a cosine to {peak * schedule.min_lr_ratio:g} one step after the last",
        "linear": f"linearly to {peak * schedule.min_lr_ratio:g} one step after the last",
    }[schedule.name]
    if train.continue_from is not None:
        after = f"after step {train.continue_from:,}, with the optimizer's state as it is: "
        return [f"learning rate {after}{start}{decay}"]
    return [f"learning rate {start}{decay}"]


def _chain(program: Program) -> list[str]:
    """Return the links that turn a step's gradient into an update, in order."""
    o = program.recipe.train.optimizer
    links = []
    if o.max_grad_norm is not None:
        links.append(f"optax.clip_by_global_norm({o.max_grad_norm:g})")
    links.append(_rule(o))
    if program.lora is not None and program.lora.loraplus_lr_ratio is not None:
        links.append(f"B's updates times {program.lora.loraplus_lr_ratio:g} (LoRA+)")
    if needs_master_weights(program.recipe):
        links.append("added to a float32 copy of the weights, which is rounded to bfloat16")
    out = [", then ".join([f"optimizer: the mean gradient of {_micro_batches(program)}", *links])]
    if o.max_grad_norm is None:
        out.append("no clipping: max_grad_norm is null")
    return [*out, *_schedule(program)]


def _rule(o: Optimizer) -> str:
    """Return the optax optimizer with its hyperparameters."""
    decay = f"weight_decay={o.weight_decay:g}"
    if o.name == "adamw":
        return f"optax.adamw(learning_rate, b1={o.b1:g}, b2={o.b2:g}, eps={o.eps:g}, {decay})"
    if o.name == "lion":
        return f"optax.lion(learning_rate, b1={o.b1:g}, b2={o.b2:g}, {decay})"
    if o.name == "adafactor":
        return f"optax.scale_by_factored_rms(), updates clipped to RMS 1, {decay} (Adafactor)"
    if o.name == "rmsprop":
        momentum = f"momentum={o.momentum:g}, " if o.momentum else ""
        return f"RMSprop(learning_rate, b2={o.b2:g}, eps={o.eps:g}), {momentum}{decay} added to the gradient"
    if o.name == "muon":
        rest = f"Adam(b1={o.b1:g}, b2={o.b2:g}, eps={o.eps:g}) for embeddings, the head and vectors"
        return f"Muon(learning_rate, momentum={o.momentum:g}) for matrices, {rest}, {decay}"
    return f"optax.sgd(learning_rate, momentum={o.momentum:g}), {decay} added to the gradient"


def _cache(program: Program) -> list[str]:
    directory = program.recipe.cache.directory
    if directory is None:
        return ["no cache is kept: each run tokenizes and compiles again"]
    where = directory if "://" in directory else f"OUTPUT/{directory}"
    return [
        f"tokenized data under {where}/data, compiled programs under {where}/xla; either is found again "
        "only when all that made it is the same, and may be removed at any time",
        "compiled programs are run without a check: protect the folder like the scripts",
    ]


def _checkpoint(program: Program) -> list[str]:
    checkpoint = program.recipe.checkpoint
    where = checkpoint.directory if "://" in checkpoint.directory else f"OUTPUT/{checkpoint.directory}"
    out = [
        f"{'weights' if program.lora is None else 'adapters'} and optimizer state every "
        f"{plural(checkpoint.every_steps, 'step')} and at the end, "
        f"under {where}, the newest {checkpoint.keep} kept; recipe.lock.json is next to them"
    ]
    if checkpoint.keep_best:
        out.append("also at each evaluation whose loss is the lowest so far; the last of these is kept")
    if checkpoint.local is not None:
        local = checkpoint.local
        out.append(
            f"also every {plural(local.every_steps, 'step')} under {local.directory} on each host; "
            "train.py resumes from there if it is newer"
        )
    return out


def _merge(program: Program) -> list[str]:
    merge = program.recipe.merge
    where = merge.output if "://" in merge.output else f"OUTPUT/{merge.output}"
    split = (
        "split as the base is"
        if merge.max_shard_size == "base"
        else f"files of {merge.max_shard_size} at most"
    )
    kind = (
        f"{merge.quantization} linear weights, the rest {merge.dtype}" if merge.quantization else merge.dtype
    )
    if program.lora is None:
        return [f"the trained weights under the base's own names, in {kind}, {split}, under {where}"]
    adapter = ", and a PEFT adapter next to it" if merge.adapter else ""
    return [
        f"the base's tensors with the adapters added in, in {kind}, {split}, under {where}{adapter}; rank "
        "and alpha are read from the checkpoint's record"
    ]


def _serve(program: Program) -> list[str]:
    serve, accelerator = program.recipe.serve, program.serve_accelerator
    if serve is None or accelerator is None:
        return []
    size = program.base_parameters * weight_size(program.recipe) / serve.tensor_parallel_size
    return [
        accelerator.describe(),
        f"{plural(serve.data_parallel_size, 'replica')}, each on "
        f"{plural(serve.tensor_parallel_size, 'device')}; its weights take about "
        f"{gib_number(size, 1)} GiB of each",
    ]


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


SUMMARIES: dict[str, Callable[[Program], list[str]]] = {
    "model": _model,
    "mesh": _mesh,
    "lora": _lora,
    "remat": _remat,
    "xla": _xla,
    "data": _data,
    "train": _train,
    "rewards": reinforcement.rewards,
    "rollout": reinforcement.rollout,
    "checkpoint": _checkpoint,
    "cache": _cache,
    "merge": _merge,
    "serve": _serve,
}
"""The functions behind `summary`, by section."""

DETAILS: dict[str, Callable[[Program], list[Sequence[Block]]]] = {
    "mesh": _shardings,
    "sharding": _shardings,
    "lora": _adapters,
}
"""The functions that `detail` adds, by section."""

TRAIN_DETAILS: dict[str, Callable[[Program], list[str]]] = {
    "optimizer": _chain,
    "schedule": lambda program: [*_schedule(program), *_length(program)],
    "epochs": _length,
    "steps": _length,
    "continue_from": lambda program: [*_schedule(program), *_length(program)],
    "early_stopping": _evaluations,
    "generations": _evaluations,
    "qat": lambda program: rounding(program) or _batches(program),
    **dict.fromkeys(("objective", *SETTINGS), lambda program: objective(program) or _batches(program)),
}
"""The functions behind `detail`, by key of the train section; other keys show the batches."""
