"""transformers' model, whose weights are jax arrays on a mesh.

The torch module is on the device `meta`: it holds no weights, only what is computed. Its weights are two
dicts: what is trained, and the base. `HfModel.hidden` puts them in and runs the module under torchax.
Only the text model is built, whatever other towers the checkpoint has.

Around its layers come recomputation and how activations lie, since transformers' own gradient checkpointing
does nothing under jax.
Dropout in PEFT's layers drops what train.py's adapters do (runtime.model.lora). Attention is computed by jax,
within segments, causal, with a window or without: transformers hands each layer's queries, keys and values
to a function that its config names, and every other argument of the model's call along with them:
`segment_ids`, from which the mask is made here. So packed rows, padding and sliding windows mean what they
mean in train.py, and no [T, T] mask is an argument of the layers. Stock scaled_dot_product_attention gives
NaN where all that a query may see is padding.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torchax
from jax import ad_checkpoint
from jax.sharding import Mesh
from torchax.ops.mappings import t2j_dtype
from transformers import AttentionInterface

from ...errors import UserError
from ...model import sharding
from ...model.adapters import Adapter, LoraSettings, Matrices, build_adapters
from ...model.attention import attend_within
from ...model.families import Architecture, Family, family_of
from ...model.families.base import Spec, text_config
from ...model.forward import Head, attention_mask
from ...model.lora import dropped
from ...model.partition_rules import Rule, divisible
from ...model.quantize import Layout, quantize
from ...model.remat import ATTENTION, POLICIES, PROJECTION
from ...settings import ModelSettings
from ...weights.agreement import HEAD
from ...weights.checkpoint import HFCheckpoint
from .configs import floats
from .own_head import OwnHead
from .placement import adapter_specs, tensor_specs
from .quantized import QuantizedLinear, replace_linears, shapes, spread, tensor_layouts

PREFIX = "model."
"""Of the decoder's weights in the module."""
BASE_LAYER = ".base_layer"
"""What PEFT puts into the name of a weight that it wraps."""

Arrays = dict[str, Any]
"""jax arrays, or jax.ShapeDtypeStruct with their shardings, by name; quantized weights as qwix.QArrays."""


@dataclass(frozen=True)
class HfModel:
    """A causal language model of transformers, and the arrays that it takes.

    Attributes:
        module: on the device meta.
        family, architecture: of its config.
        adapters: in layer order, () without LoRA.
        trained: shapes of what is trained, by a trace's names: "layers.0.self_attn.q_proj.lora_A", or the
            module's own ("model.layers.0.self_attn.q_proj.weight") without LoRA.
        base: shapes of the other weights and of all buffers, by the module's names.
        quantized: how those of the base lie that are stored quantized, by the module's names; {} for none.
        computed: values of the buffers that no checkpoint holds.
        places: name in the module of each trained array.
        softcap: of the logits, None for none.
    """

    module: torch.nn.Module
    family: Family
    architecture: Architecture
    adapters: tuple[Adapter, ...]
    trained: Arrays
    base: Arrays
    quantized: dict[str, Layout]
    computed: dict[str, np.ndarray]
    places: dict[str, str]
    softcap: float | None

    @property
    def dtype(self) -> Any:
        """Of the base's weights, and of what quantized ones are computed with."""
        return t2j_dtype(self.module.get_input_embeddings().weight.dtype)  # type: ignore[operator]

    dealt = False

    def hidden(
        self, arrays: tuple[Arrays, Arrays, jax.Array | None], tokens: Any, positions: Any, segment_ids: Any
    ) -> jax.Array:
        """[B, T, D]: the hidden states after the final norm.

        Args:
            arrays: trained ones, the base, and the rows' salts of dropout (`lora.row_salts`), which
                is off without them. Without any adapter's, the projections are the base's own: the model that
                training started from.
            tokens, positions, segment_ids: int32[B, T].
        """
        inputs = {"input_ids": tokens, "position_ids": positions, "segment_ids": segment_ids}
        return self._decoded(arrays, inputs, arrays[2] is not None)

    def _decoded(
        self, arrays: tuple[Arrays, Arrays, jax.Array | None], inputs: Mapping[str, Any], training: bool
    ) -> jax.Array:
        """[B, T, D] of the decoder called with these inputs; `training` is torch's mode."""
        trained, base, salts = arrays
        values = {**base, **{self.places[name]: array for name, array in trained.items()}}
        decoder: Any = self.module.model
        decoder.train(training)
        env = torchax.default_env()
        own = {
            name.removeprefix(PREFIX): env.j2t_iso(array)
            for name, array in spread(values).items()
            if name.startswith(PREFIX)
        }
        given = {**env.j2t_iso(dict(inputs)), "use_cache": False}
        with self._adapters(bool(trained)), _drawing(decoder, salts), env, torch.no_grad():
            out = torch.func.functional_call(decoder, own, (), given)
            return env.t2j_iso(env.v2t_iso(out.last_hidden_state))

    def head(self, arrays: tuple[Arrays, Arrays, jax.Array | None]) -> Head:
        """The output head: lm_head's weight, or the embedding where they are tied; [V, D] in torch."""
        trained, base, _ = arrays
        values = {**base, **{self.places[name]: array for name, array in trained.items()}}
        weight = values[HEAD] if HEAD in values else values[f"{PREFIX}embed_tokens.weight"]
        scale = getattr(self.architecture, "logit_scale", 1.0)
        return Head(weight, tied=True, dtype=None, softcap=self.softcap, cap_dtype=None, scale=scale)

    @contextmanager
    def _adapters(self, enabled: bool) -> Iterator[None]:
        """Leaves PEFT's adapters out of what is traced unless they are enabled."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        wrapped = [layer for layer in self.module.modules() if isinstance(layer, BaseTunerLayer)]
        for layer in wrapped:
            layer.enable_adapters(enabled)
        try:
            yield
        finally:
            for layer in wrapped:
                layer.enable_adapters(True)


class AsItIs(HfModel):
    """A model that no family describes, computed by transformers' code alone.

    Attention is transformers' eager one, with its scores [B, N, T, T] and its mask [B, 1, T, T] whole.
    Samples of a packed row are told apart by their positions, as transformers does it. Dropout of the model's
    own is off; that of adapters is as in any other model.
    """

    dealt = False

    def hidden(
        self, arrays: tuple[Arrays, Arrays, jax.Array | None], tokens: Any, positions: Any, segment_ids: Any
    ) -> jax.Array:
        inputs = {"input_ids": tokens}
        if "position_ids" in inspect.signature(type(self.module.model).forward).parameters:  # type: ignore[union-attr]
            inputs["position_ids"] = positions
        return self._decoded(arrays, inputs, training=False)

    def head(self, arrays: tuple[Arrays, Arrays, jax.Array | None]) -> OwnHead:
        _, base, _ = arrays
        name = HEAD if HEAD in base else f"{PREFIX}embed_tokens.weight"
        rest = {key: array for key, array in base.items() if not key.startswith(PREFIX) and key != HEAD}
        return OwnHead(
            base[name],
            tied=True,
            dtype=None,
            softcap=None,
            cap_dtype=None,
            module=self.module,
            name=name,
            rest=rest,
        )


def abstract_model(
    config: Mapping[str, Any],
    settings: ModelSettings,
    lora: LoraSettings | None,
    mesh: Mesh,
    rules: Sequence[Rule] = (),
    architecture: Architecture | None = None,
) -> HfModel:
    """The model with shapes for arrays: no weight is allocated, and no device is asked for anything.

    Args:
        config: config.json's values, of the whole checkpoint or of its text model.
        rules: the recipe's sharding rules.
        architecture: what the family makes of them; None where the config alone tells it.

    Raises:
        UserError: when the family is not known, or a rule does not fit.
    """
    family = family_of(config)
    architecture = architecture or family.architecture(config)
    axes, kind = dict(mesh.shape), None if lora is None else lora.quantize
    try:
        specs = tensor_specs(family, architecture, rules, axes)
        stored = {} if kind is None else tensor_layouts(family, architecture, rules, kind, axes)
    except ValueError as error:
        raise UserError(
            f"sharding rules: {error}", "the rules were checked when the recipe was built: build it again"
        ) from None
    adapters = () if lora is None else tuple(build_adapters(family, architecture, lora))
    module = _adapted(config, settings, family, adapters, lora)

    def placed(name: str, shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
        spec = specs.get(tensor_name(name), (None,) * len(shape))
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding.named(mesh, spec))

    base: Arrays = {}
    computed = {}
    quantized = {}
    for name, parameter in module.named_parameters():
        how = stored.get(tensor_name(name))
        if how is not None:
            quantized[name] = how
            base[name] = shapes(how, mesh)
        elif ".lora_" not in name:
            base[name] = placed(name, parameter.shape, t2j_dtype(parameter.dtype))
    for name, buffer in module.named_buffers():
        base[name] = placed(name, buffer.shape, t2j_dtype(buffer.dtype))
        if tensor_name(name) not in specs:
            computed[name] = buffer.detach().float().numpy().astype(t2j_dtype(buffer.dtype))
    replace_linears(module, {name: base[name] for name in quantized}, settings.dtype)
    _name_projections(module.model)  # type: ignore[arg-type]
    trained, places = _trained(family, architecture, adapters, lora, specs, mesh, base)
    softcap = getattr(module.config, "final_logit_softcapping", None)
    made = HfModel if family.tunix else AsItIs
    return made(module, family, architecture, adapters, trained, base, quantized, computed, places, softcap)


def load_base(model: HfModel, checkpoint: HFCheckpoint) -> Arrays:
    """The base's arrays on their devices, by the module's names.

    Each shard is read from the checkpoint's file, cast and placed by itself; what is stored quantized takes
    its weight's place before the next one is read.

    Raises:
        UserError: when the checkpoint lacks a tensor.
    """
    out: Arrays = {}
    for name, wanted in model.base.items():
        if name in model.computed:
            out[name] = _place(wanted, model.computed[name])
        elif name in model.quantized:
            place: Any = wanted.qvalue.sharding
            weight = jax.ShapeDtypeStruct(wanted.shape, model.dtype, sharding=place)
            out[name] = quantize(_load(name, weight, checkpoint), model.quantized[name], place.mesh)
        else:
            out[name] = _load(name, wanted, checkpoint)
    return out


def load_trained(model: HfModel, checkpoint: HFCheckpoint) -> Arrays:
    """What full fine-tuning begins with; as `load_base`."""
    return {name: _load(name, wanted, checkpoint) for name, wanted in model.trained.items()}


def with_reference(model: HfModel, base: Arrays, start: Arrays) -> Arrays:
    """The base with what full fine-tuning begins with, which trained arrays take the place of where there are
    any: without them, it is the model that training starts from.

    Args:
        start: by the names of `HfModel.trained`.
    """
    return {**base, **{model.places[name]: array for name, array in start.items()}}


def place_trained(model: HfModel, values: Mapping[str, Matrices]) -> Arrays:
    """Adapters on their devices.

    Args:
        values: A [rank, in] and B [out, rank] of each projection.
    """
    out: Arrays = {}
    for name, wanted in model.trained.items():
        module, letter = name.rsplit(".lora_", 1)
        out[name] = _place(wanted, values[module]["AB".index(letter)])
    return out


def tensor_name(name: str) -> str:
    """A tensor's name without prefix, as the families have it, from the module's."""
    return name.replace(BASE_LAYER, "").removeprefix(PREFIX)


def checkpoint_name(name: str, checkpoint: HFCheckpoint) -> str:
    """A tensor's full name in a checkpoint, from the module's."""
    if not name.startswith(PREFIX):
        return name
    return checkpoint.prefix + tensor_name(name)


def _load(name: str, wanted: jax.ShapeDtypeStruct, checkpoint: HFCheckpoint) -> jax.Array:
    full = checkpoint_name(name, checkpoint)
    array = _place(wanted, checkpoint.read(full))
    checkpoint.release(full)
    return array


def _place(wanted: jax.ShapeDtypeStruct, value: np.ndarray) -> jax.Array:
    shards: dict[Any, np.ndarray] = {}

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        key = tuple((part.start, part.stop) for part in index)
        if key not in shards:
            shards.clear()
            shards[key] = np.asarray(value[index], wanted.dtype)
        return shards[key]

    return jax.make_array_from_callback(wanted.shape, wanted.sharding, shard)


def _adapted(
    config: Mapping[str, Any],
    settings: ModelSettings,
    family: Family,
    adapters: Sequence[Adapter],
    lora: LoraSettings | None,
) -> torch.nn.Module:
    """transformers' model with PEFT's adapters, its layers wrapped.

    Raises:
        UserError: when it is a model that no family describes, and one of the two does not take it.
    """
    try:
        module = _module(config, settings, _register(settings) if family.tunix else "eager")
        if lora is not None:
            _attach(module, adapters, lora)
        module.tie_weights()  # type: ignore[operator]
        _wrap(module.model, settings.remat)  # type: ignore[arg-type]
    except Exception as error:
        if family.tunix:
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{config.get('model_type')}: transformers or PEFT does not take it: {reason}",
            "where it is a module that cannot be adapted, leave it out of lora.targets",
        ) from error
    return module


def _module(config: Mapping[str, Any], settings: ModelSettings, attention: str) -> torch.nn.Module:
    """transformers' text model of a config, its parameters on meta, its computed buffers as they are.

    Args:
        attention: transformers' attn_implementation.
    """
    import transformers
    from peft.utils.integrations import init_empty_weights

    text = floats(dict(text_config(config)))
    made = transformers.AutoConfig.for_model(**text)
    if "tie_word_embeddings" in config:
        made.tie_word_embeddings = config["tie_word_embeddings"]
    with init_empty_weights(), _quiet():
        module = transformers.AutoModelForCausalLM.from_config(
            made, dtype=getattr(torch, settings.dtype), attn_implementation=attention
        )
    return module.requires_grad_(False)


def _attach(module: torch.nn.Module, adapters: Sequence[Adapter], lora: LoraSettings) -> None:
    """PEFT's LoRA layers on the recipe's projections."""
    import peft

    names = [part.name for adapter in adapters for part in adapter.projections]
    patterns = {name: re.escape(PREFIX + name) for name in names}
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        target_modules=[PREFIX + name for name in names],
        rank_pattern={patterns[n]: lora.rank_of(n) for n in names if lora.rank_of(n) != lora.rank},
        alpha_pattern={patterns[n]: lora.alpha_of(n) for n in names if lora.alpha_of(n) != lora.alpha},
    )
    with _quiet():
        peft.inject_adapter_in_model(settings, module, low_cpu_mem_usage=True)
    _replace_dropout(module, PREFIX)


def _trained(
    family: Family,
    architecture: Architecture,
    adapters: Sequence[Adapter],
    lora: LoraSettings | None,
    specs: Mapping[str, Spec],
    mesh: Mesh,
    base: Arrays,
) -> tuple[Arrays, dict[str, str]]:
    """What is trained and its names in the module. Without LoRA it is taken out of `base`."""
    trained: Arrays = {}
    places: dict[str, str] = {}
    if lora is None:
        wanted = {s.name for p in family.parameters(architecture) if p.trainable for s in p.sources}
        for name in [name for name in base if tensor_name(name) in wanted]:
            trained[name] = base.pop(name)
            places[name] = name
        return trained, places
    dtype = t2j_dtype(getattr(torch, lora.dtype))
    for adapter in adapters:
        for part in adapter.projections:
            pair = zip("AB", adapter.shapes(part), adapter_specs(specs[f"{part.name}.weight"]), strict=True)
            for letter, shape, spec in pair:
                name = f"{part.name}.lora_{letter}"
                place = sharding.named(mesh, divisible(shape, spec, mesh.shape))
                trained[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=place)
                places[name] = f"{PREFIX}{part.name}.lora_{letter}.default.weight"
    return trained, places


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


ROWS = ("fsdp", None, "tp")
"""The sharding of hidden states [B, T, D], Tunix's own. Left to itself, XLA fills the step with all-to-alls;
with whole features, each device of tp computes all of the norms and of the adapters' A."""


def _wrap(decoder: torch.nn.Module, remat: str) -> None:
    """Wraps every layer of a decoder (`model.model` of a causal LM), and its rotary embedding.

    Args:
        remat: the recipe's policy; "none" keeps every activation. "block" is "decoder" here.
    """
    for layer in decoder.layers:  # type: ignore[union-attr]
        layer.forward = _layer(layer.forward, remat)
    for name, rotary in decoder.named_modules():
        if name.endswith("rotary_emb"):
            rotary.forward = _exactly(rotary.forward)


def _layer(forward: Callable[..., Any], remat: str) -> Callable[..., Any]:
    def run(hidden: Any, *args: Any, **kwargs: Any) -> Any:
        env = torchax.default_env()
        shared = kwargs.get("shared_kv_states")

        def body(hidden: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
            # What a layer adds for later ones (Gemma 4's keys and values) has to leave as a result.
            held = UserDict(shared or {})
            more = kwargs if shared is None else {**kwargs, "shared_kv_states": held}
            out = forward(env.j2t_iso(hidden), *args, **more)
            added = {name: pair for name, pair in held.items() if shared.get(name) is not pair}  # type: ignore[union-attr]
            return env.t2j_iso(env.v2t_iso((out, added)))

        computed = body if remat == "none" else jax.checkpoint(body, policy=POLICIES[remat])
        placed = sharding.constrain(env.t2j_iso(env.v2t_iso(hidden)), ROWS)
        out, added = computed(placed)
        if shared is not None:
            shared.update(env.j2t_iso(added))
        if isinstance(out, tuple):  # its hidden states, and what else the layer gives
            return env.j2t_iso((sharding.constrain(out[0], ROWS), *out[1:]))
        return env.j2t_iso(sharding.constrain(out, ROWS))

    return run


def _name_projections(decoder: torch.nn.Module) -> None:
    """Gives what a decoder's projections compute remat.py's name. Those of an adapter's parts have it too:
    what the backward pass does not need is not kept."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for part in decoder.modules():
        if isinstance(part, (torch.nn.Linear, QuantizedLinear, BaseTunerLayer)):
            part.forward = _named(part.forward)  # type: ignore[method-assign]


def _named(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        env = torchax.default_env()
        out = env.t2j_iso(env.v2t_iso(forward(*args, **kwargs)))
        return env.j2t_iso(ad_checkpoint.checkpoint_name(out, PROJECTION))

    return run


def _exactly(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Rotary angles in float32 in earnest: a TPU multiplies float32 in bfloat16 unless it is told otherwise,
    and position 257 is none of bfloat16's numbers."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return forward(*args, **kwargs)

    return run


class RowDropout(torch.nn.Module):
    """In place of torch's dropout before a projection's A.

    Args:
        projection: "layers.0.self_attn.q_proj".
        rate: probability that an element is dropped.

    Attributes:
        salts: uint32[B] of the rows that are traced, None for no dropout.
    """

    def __init__(self, projection: str, rate: float) -> None:
        super().__init__()
        self.salts: jax.Array | None = None
        self._projection, self._rate = projection, rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, T, D] with elements dropped."""
        if self.salts is None:
            return x
        env = torchax.default_env()
        out = dropped(env.t2j_iso(env.v2t_iso(x)), self.salts, self._projection, self._rate)
        return env.j2t_iso(out)


def _replace_dropout(module: torch.nn.Module, prefix: str) -> None:
    """Gives every adapted projection its own dropout.

    Args:
        module: with PEFT's layers.
        prefix: of the projections' names in it.
    """
    from peft.tuners.lora import LoraLayer

    for name, layer in module.named_modules():
        if isinstance(layer, LoraLayer):
            for adapter, dropout in layer.lora_dropout.items():
                if isinstance(dropout, torch.nn.Dropout):
                    layer.lora_dropout[adapter] = RowDropout(name.removeprefix(prefix), dropout.p)


@contextmanager
def _drawing(module: torch.nn.Module, salts: jax.Array | None) -> Iterator[None]:
    """Dropout by the rows' salts while a module is traced."""
    places = [part for part in module.modules() if isinstance(part, RowDropout)]
    for place in places:
        place.salts = salts
    try:
        yield
    finally:
        for place in places:
            place.salts = None


class _Scores(NamedTuple):
    """What a layer's scores are: their factor, how many tokens a token sees, and the cap; None for none."""

    scale: float
    window: int | None
    softcap: float | None


def _register(settings: ModelSettings) -> str:
    """Makes a recipe's attention known to transformers.

    Returns:
        What to give as attn_implementation. transformers makes no mask for a name that it has none for.
    """
    block = settings.attention_block
    kernel = _dot if settings.attention == "dot" else partial(_splash, most=block)

    def attend(
        module: torch.nn.Module,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        **options: Any,
    ) -> tuple[Any, None]:
        """[B, T, N, H] from query [B, N, T, H] and key, value [B, K, T, H]."""
        q, k, v, segments = _arrays(query, key, value, options["segment_ids"])
        how = _Scores(options["scaling"], options.get("sliding_window"), options.get("softcap"))
        out = kernel(q, k, v, segments, how)
        return torchax.default_env().j2t_iso(out), None

    name = f"recipec_{settings.attention}_{block}"
    AttentionInterface.register(name, attend)
    return name


def _dot(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, how: _Scores) -> jax.Array:
    """[B, T, N, H] from q [B, T, N, H] and k, v [B, T, K, H]; scores and sums in float32."""
    mask = _visible(segments, how.window)
    if how.softcap is None:
        out = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], scale=how.scale)
    else:
        out = _soft_capped(q, k, v, mask, how.scale, how.softcap)
    return ad_checkpoint.checkpoint_name(out, ATTENTION)


def _splash(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, how: _Scores, most: int | None
) -> jax.Array:
    """As `_dot`, by the TPU's kernel, which names what it keeps itself."""
    return attend_within(segments, most)(q * how.scale, k, v, how.window, how.softcap)


def _visible(segment_ids: jax.Array, window: int | None) -> jax.Array:
    """What each token may attend to: bool[B, T, T], indexed by row, query and key.

    Args:
        segment_ids: int32[B, T], 0 for padding.
        window: how many tokens a token sees, itself included; None for all before it.
    """
    mask = attention_mask(segment_ids)
    if window is None:
        return mask
    at = jnp.arange(segment_ids.shape[1])
    return mask & (at[:, None] - at[None, :] < window)


def _soft_capped(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, scale: float, softcap: float
) -> jax.Array:
    """Gemma 2's: scores become tanh(s / softcap) * softcap before the mask."""
    rows, length, heads, size = q.shape
    grouped = q.reshape(rows, length, k.shape[2], heads // k.shape[2], size)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, k, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(mask[:, None, None], jnp.tanh(scores / softcap) * softcap, -0.7 * 3.4e38)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights, v).reshape(rows, length, heads, size)


def _arrays(query: Any, key: Any, value: Any, segment_ids: Any) -> tuple[jax.Array, ...]:
    env = torchax.default_env()
    q, k, v, segments = env.t2j_iso(env.v2t_iso((query, key, value, segment_ids)))
    split = ("fsdp", None, "tp", None)
    return (*(sharding.constrain(x.swapaxes(1, 2), split) for x in (q, k, v)), segments)
