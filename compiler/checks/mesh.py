"""Check the mesh against the accelerator's devices, the model's heads and the chips' memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from recipec.compiler.lowering.facts import Facts
from recipec.compiler.lowering.hardware import arranged, from_name, host_counts, known_names
from recipec.compiler.lowering.sizes import BYTES, beside_bytes, tp_sizes
from recipec.compiler.wording import divisors, in_layers, listing, mesh_axes, plural
from recipec.runtime.model.families import Architecture
from recipec.runtime.model.families.family import NONE
from recipec.runtime.model.partition_rules import TOKENS, dealt_length, shards
from recipec.spec.codes import Code
from recipec.spec.core_schema import flow
from recipec.spec.diagnostics import Diagnostic

if TYPE_CHECKING:
    from recipec.spec.language import Recipe


W0219 = Code(
    "W0219",
    "offloading on a CPU",
    cause="On a CPU there is no separate host memory to offload activations to. They are kept, as "
    "with save_dots.",
    cure="Write `remat.policy: save_dots`.",
)


def check(facts: Facts) -> Iterator[Diagnostic]:
    yield from _product(facts)
    yield from _hosts(facts)
    yield from _heads(facts)
    yield from _experts(facts)
    yield from _tokens(facts)
    yield from _micro_batch(facts)
    yield from _memory(facts)
    accelerator = facts.accelerator
    if facts.recipe.remat.policy == "offload_dots" and accelerator and accelerator.platform == "cpu":
        yield Diagnostic(
            W0219,
            f"remat.policy offload_dots moves activations to the host's memory, which is the only memory of "
            f"{accelerator.name}: it has the effect of save_dots",
            "remat.policy",
            "policy: save_dots",
        )


E0202 = Code(
    "E0202",
    "mesh axes do not multiply to the devices",
    cause="The product of the axes differs from the number of devices. A v5p-8 has four chips and "
    "four devices.",
    cure="Choose axes whose product is the number of devices that the message gives.",
)


def _product(facts: Facts) -> Iterator[Diagnostic]:
    accelerator, axes = facts.accelerator, facts.axes
    if accelerator is None:
        return
    product = math.prod(axes.values())
    if product == accelerator.devices:
        return
    spelled = mesh_axes(axes)
    named = facts.recipe.mesh.accelerator or facts.recipe.mesh.topology
    slices = accelerator.slices
    of, have = (f"{slices} slices of ", "have") if slices > 1 else ("", "has")
    counted = accelerator.devices == accelerator.chips
    has = plural(accelerator.devices, "virtual CPU device" if accelerator.platform == "cpu" else "device")
    if accelerator.platform == "tpu":
        has = (
            plural(accelerator.chips, "chip") if counted else f"{has} on {plural(accelerator.chips, 'chip')}"
        )
    reason = ""
    if accelerator.name_counts == "tensorcores" and facts.recipe.mesh.accelerator:
        reason = f": the number in its name counts TensorCores, {accelerator.tensorcores_per_chip} to a chip"
    yield Diagnostic(
        E0202,
        f"the mesh {spelled} needs {plural(product, 'device')}, and {of}`{named}` {have} {has}{reason}",
        "mesh.axes",
        _arrangements(facts),
    )


E0221 = Code(
    "E0221",
    "number of hosts does not fit the accelerator",
    cause="A slice has a fixed number of machines: Cloud TPU VMs, or on GKE machines with 4 chips. On "
    "a CPU, the processes must share the virtual devices evenly.",
    cure="Leave `mesh.hosts` out, or use a number that the message gives.",
)


def _hosts(facts: Facts) -> Iterator[Diagnostic]:
    mesh, accelerator = facts.recipe.mesh, facts.accelerator
    if mesh.hosts is None or accelerator is None:
        return
    possible = host_counts(mesh)
    if mesh.hosts in possible:
        return
    counts = listing(map(str, possible), "or")
    if accelerator.platform == "cpu":
        devices = plural(accelerator.devices, "virtual device")
        message = f"{accelerator.name} has {devices}, which {mesh.hosts} processes cannot share evenly"
    else:
        machine = "machine" if possible == [1] else "machines"
        of = f"{plural(accelerator.slices, 'slice')} of " if accelerator.slices > 1 else ""
        message = f"{of}{accelerator.name} {'have' if of else 'has'} {counts} {machine}"
    yield Diagnostic(
        E0221, f"hosts is {mesh.hosts}, but {message}", "mesh.hosts", f"hosts: {counts}, or leave it out"
    )


E0203 = Code(
    "E0203",
    "tp does not divide the heads",
    cause="tp splits attention heads and key/value heads over devices. Layers can differ: Gemma 4 31B "
    "has 16 key/value heads in its local layers and 4 in its global ones.",
    cure="Choose a tp that divides every number of heads, and put the remaining devices on fsdp. Or "
    "keep those weights whole with `sharding.on_indivisible: replicate`.",
)

W0203 = Code(
    "W0203",
    "heads are kept whole under tp",
    cause="tp does not divide the number of heads, and `on_indivisible: replicate` keeps a full copy "
    "of their weights on every device.",
    cure="Nothing, if this is intended. It costs memory and repeats work.",
)


def _heads(facts: Facts) -> Iterator[Diagnostic]:
    """Check that tp divides the heads of every layer; kinds of layers may differ in their heads."""
    tp = facts.axes["tp"]
    if facts.model is None or tp == 1 or not facts.model.family.tunix:
        return  # XLA chooses how to split transformers' eager attention
    architecture, title = facts.model.architecture, facts.model.title
    replicate = facts.recipe.sharding.on_indivisible == "replicate"
    for noun, counts in (
        ("attention head", _by_count(architecture, "heads")),
        ("key/value head", _by_count(architecture, "kv_heads")),
    ):
        for count, layers in counts.items():
            if count % tp == 0:
                continue
            where = in_layers(architecture.layer_types, layers)
            has = f"{title} has {plural(count, noun)} in {where}"
            if count == 1 and noun == "key/value head":
                continue  # each device keeps the one small head
            if replicate:
                yield Diagnostic(
                    W0203,
                    f"{has}, which tp={tp} does not divide: each of the {tp} devices keeps a full copy of "
                    "their weights",
                    "mesh.axes.tp",
                    _arrangements(facts),
                )
            else:
                yield Diagnostic(
                    E0203, f"tp={tp} does not divide the heads: {has}", "mesh.axes.tp", _arrangements(facts)
                )


E0222 = Code(
    "E0222",
    "ep without experts",
    cause="The mesh axis ep splits the experts of a layer over devices. The model has no experts.",
    cure="Give its devices to fsdp, which splits the batch and the weights.",
)


def _experts(facts: Facts) -> Iterator[Diagnostic]:
    """Check ep, which splits only experts."""
    ep = facts.axes.get("ep", 1)
    if facts.model is None or ep == 1:
        return
    if not any("ep" in parameter.spec for parameter in facts.defaults):
        other = {name: size for name, size in facts.axes.items() if name != "ep"}
        yield Diagnostic(
            E0222,
            f"ep={ep} splits experts, and {facts.model.title} has none",
            "mesh.axes.ep",
            f"axes: {flow({**other, 'fsdp': other['fsdp'] * ep})}",
        )


E0225 = Code(
    "E0225",
    "tokens that cannot be split",
    cause="The mesh axis cp splits the tokens of a row over devices. Layers with experts sort all "
    "tokens of a device, and layers that carry a state from token to token compute them in order. "
    "Neither can be split this way.",
    cure="Give its devices to fsdp, which splits the batch and the weights.",
)

N0226 = Code(
    "N0226",
    "rows are lengthened",
    cause="With cp, splash attention computes a row in two pieces for each device, and each piece in "
    "blocks of 128 tokens. A row is padded to a multiple of these.",
    cure="Set `data.max_length` to a multiple of 256 times cp.",
)


def _tokens(facts: Facts) -> Iterator[Diagnostic]:
    """Check cp, which splits the tokens of a row. The model has to be able to compute the parts
    separately."""
    axes, recipe = facts.axes, facts.recipe
    cp = axes.get(TOKENS, 1)
    if facts.model is None or cp == 1:
        return
    architecture, title = facts.model.architecture, facts.model.title
    reason = ""
    if architecture.expert_layers:
        reason = f"the experts of {title} sort all tokens of a device"
    elif architecture.stateful:
        reason = f"layers of {title} carry a state from token to token"
    if reason:
        other = {name: size for name, size in axes.items() if name != TOKENS}
        yield Diagnostic(
            E0225,
            f"cp={cp} splits the tokens of a row, but {reason}",
            "mesh.axes.cp",
            f"axes: {flow({**other, 'fsdp': other['fsdp'] * cp})}, and a global_batch_size that fits",
        )
        return
    length = recipe.data.max_length
    longer = dealt_length(length, cp)
    if recipe.model.attention == "splash" and longer != length:
        within = facts.positions is None or longer <= facts.positions
        yield Diagnostic(
            N0226,
            f"rows of {length:,} tokens are padded to {longer:,}: cp={cp} splits them into {2 * cp} pieces "
            "of whole blocks of 128 tokens",
            "data.max_length",
            f"max_length: {longer} costs the same" if within else None,
        )


N0218 = Code(
    "N0218",
    "one sample at a time",
    cause="All devices share one sample (tp), although they could compute several (fsdp). tp "
    "exchanges activations in every layer.",
    cure="Put the devices on fsdp, as far as the global batch size allows.",
)


def _micro_batch(facts: Facts) -> Iterator[Diagnostic]:
    """Note a mesh whose devices share one sample at a time: tp costs communication that fsdp would not."""
    train, axes = facts.recipe.train, facts.axes
    if axes["tp"] == 1 or TOKENS in axes or train.micro_batch_size > 1 or facts.data_parallel > 1:
        return
    devices = axes["fsdp"] * axes["tp"]  # ep splits the batch
    most = max(size for size in divisors(devices) if train.global_batch_size % size == 0)
    if most == 1:
        return
    yield Diagnostic(
        N0218,
        f"the {devices} devices share one sample at a time, and exchange activations in every layer. With "
        f"the weights split over fsdp instead, they compute {most} samples at once",
        "mesh.axes",
        f"axes: {flow(arranged(1, most, devices // most))}",
    )


E0216 = Code(
    "E0216",
    "weights do not fit",
    cause="The base weights alone, split over this mesh, need more memory than a chip has.",
    cure="Use a larger slice, or split the weights over all of its devices.",
)


def _memory(facts: Facts) -> Iterator[Diagnostic]:
    """Check the chips' memory against the weights alone, or against everything that training all of them
    needs.

    Both are lower bounds under any settings.
    """
    accelerator = facts.accelerator
    if accelerator is None or accelerator.hbm_gib is None or facts.model is None:
        return
    recipe = facts.recipe
    size = BYTES[recipe.model.dtype]
    if recipe.model.quantization is not None:
        return  # quantized weights are smaller, and their size is not known yet
    state = state_bytes(recipe)
    if state:
        gib = weight_gib(facts, size + state) * accelerator.devices_per_chip
        if gib > accelerator.hbm_gib:
            yield Diagnostic(
                E0216,
                f"the weights of {facts.model.title}, their gradient and the state of "
                f"{recipe.train.optimizer.name} take {gib:.1f} GiB of each chip under this mesh, and a "
                f"{accelerator.name} chip has {accelerator.hbm_gib:g} GiB",
                "mesh.axes",
                f"lora: {{rank: 16}} trains adapters; or {_wider(facts, size + state)}",
            )
        return
    gib = weight_gib(facts, size) * accelerator.devices_per_chip
    if gib > accelerator.hbm_gib:
        yield Diagnostic(
            E0216,
            f"the base weights of {facts.model.title} in {facts.recipe.model.dtype} take {gib:.1f} GiB of "
            f"each chip under this mesh, and a {accelerator.name} chip has {accelerator.hbm_gib:g} GiB",
            "mesh.axes",
            _wider(facts, size),
        )


def _wider(facts: Facts, bytes_per_number: int) -> str:
    """Return the smallest slice of the generation that holds the weights and fits the batch, as a help."""
    accelerator, train = facts.accelerator, facts.recipe.train
    assert accelerator is not None and accelerator.hbm_gib is not None
    for name in known_names():
        other = from_name(name)
        if other.generation != accelerator.generation:
            continue
        for tp in _tensor_parallel_sizes(facts, other.devices):
            sizes = arranged(1, other.devices // tp, tp)
            whole = train.global_batch_size % (train.micro_batch_size * sizes["fsdp"]) == 0
            gib = weight_gib(facts, bytes_per_number, sizes) * other.devices_per_chip
            if whole and gib <= accelerator.hbm_gib:
                return f"mesh: {{accelerator: {name}, axes: {flow(sizes)}}} holds them"
    return "use a mesh that splits the weights over more devices, and a global_batch_size that fits it"


def state_bytes(recipe: Recipe) -> int:
    """Return the bytes per weight of its gradient, copies and optimizer state; 0 with adapters."""
    if recipe.lora is not None:
        return 0
    size = BYTES[recipe.model.dtype]
    return size + beside_bytes(recipe, size)


def weight_gib(facts: Facts, bytes_per_number: int, axes: Mapping[str, int] | None = None) -> float:
    """Return the GiB of base weights on one device under the recipe's shardings.

    Args:
        axes: sizes of the mesh's axes; None for the recipe's.
    """
    sizes = facts.axes if axes is None else axes
    numbers = sum(
        math.prod(parameter.shape) / math.prod(shards(axis, sizes) for axis in parameter.spec)
        for parameter in facts.ruled
    )
    return numbers * bytes_per_number / 2**30


def _tensor_parallel_sizes(facts: Facts, devices: int) -> list[int]:
    """Return the sizes of tp that a slice's devices and the model's heads allow."""
    return divisors(devices) if facts.model is None else tp_sizes(facts.model.architecture, devices)


def _arrangements(facts: Facts) -> str:
    """Return the axes that fit the devices and the heads, as a line of the recipe."""
    accelerator = facts.accelerator
    slices = accelerator.slices if accelerator else facts.axes.get("dcn", 1)
    slice_devices = (accelerator.devices if accelerator else math.prod(facts.axes.values())) // slices
    cp = math.gcd(facts.axes.get(TOKENS, 1), slice_devices)
    choices = [
        flow(arranged(slices, slice_devices // cp // tp, tp, cp))
        for tp in _tensor_parallel_sizes(facts, slice_devices // cp)
    ]
    return f"axes: {listing(choices, 'or')}"


def _by_count(architecture: Architecture, of: str) -> dict[int, list[int]]:
    """Group layers by their number of heads (`of` is "heads" or "kv_heads")."""
    out: dict[int, list[int]] = {}
    for layer, kind in enumerate(architecture.layer_types):
        if kind != NONE:
            out.setdefault(getattr(architecture, of)(layer), []).append(layer)
    return out
