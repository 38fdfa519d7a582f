"""transformers' model with its weights as jax arrays on a mesh.

The torch module is on the device `meta`: it defines the computation and holds no weights. The weights are two
dicts: the trained arrays, and the base. `HfModel.hidden` puts them in and runs the module under torchax.
Only the text model is built, even if the checkpoint has other towers.

The layers are wrapped to recompute activations and to set their sharding, because transformers' own gradient
checkpointing has no effect under jax.
Dropout in PEFT's layers drops the same elements as train.py's adapters (runtime.model.lora). jax computes
attention: causal, within segments, with or without a window. transformers passes each layer's queries, keys
and values to the function that its config names, with every other argument of the model's call. One of them
is `segment_ids`, from which the mask is built here. So packed rows, padding and sliding windows mean the same
as in train.py, and the layers take no [T, T] mask. Stock scaled_dot_product_attention gives NaN for a query
that can see only padding.

Logits are computed from final hidden states by the model's own code. Its forward pass runs without the
decoder, so its multipliers, caps and biases all apply.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torchax
import transformers
from jax import ad_checkpoint
from jax.sharding import Mesh
from torchax.ops.mappings import t2j_dtype
from transformers import AttentionInterface
from transformers.modeling_outputs import BaseModelOutputWithPast

from ...errors import UserError
from ...model import sharding
from ...model.adapters import Adapter, LoraSettings, Matrices, build_adapters
from ...model.attention import Scoring, splash_in_scope
from ...model.families import Architecture, Family, family_of
from ...model.families.family import Spec, text_config
from ...model.forward import Head
from ...model.layers import attention_mask
from ...model.lora import dropped
from ...model.partition_rules import Rule, divisible
from ...model.quantize import Layout, quantize
from ...model.remat import ATTENTION, POLICIES, PROJECTION
from ...settings import ModelSettings
from ...weights.checkpoint import HFCheckpoint
from .configs import floats
from .placement import adapter_specs, tensor_specs
from .quantized_base import QuantizedLinear, replace_linears, shapes, spread, tensor_layouts

PREFIX = "model."
HEAD = "lm_head.weight"
"""Prefix of the names of the decoder's weights in the module."""
BASE_LAYER = ".base_layer"
"""What PEFT inserts into the name of a weight that it wraps."""

Arrays = dict[str, Any]
"""jax arrays, or jax.ShapeDtypeStruct with shardings, by name; quantized weights are qwix.QArrays."""


@dataclass(frozen=True)
class HfModel:
    """A causal language model of transformers, and the arrays that it takes.

    Attributes:
        module: on the device meta.
        family, architecture: of its config.
        adapters: in layer order, () without LoRA.
        trained: shapes of the trained arrays, by a trace's names: "layers.0.self_attn.q_proj.lora_A", or the
            module's own ("model.layers.0.self_attn.q_proj.weight") without LoRA.
        base: shapes of the other weights and of all buffers, by the module's names.
        quantized: layouts of the base's quantized weights, by the module's names; {} for none.
        computed: values of the buffers that no checkpoint holds.
        places: the name in the module of each trained array.
        softcap: cap of the logits; None for none.
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
        """The dtype of the base's weights, and of computation with quantized ones."""
        return t2j_dtype(self.module.get_input_embeddings().weight.dtype)  # type: ignore[operator]

    dealt = False

    def hidden(
        self, arrays: tuple[Arrays, Arrays, jax.Array | None], tokens: Any, positions: Any, segment_ids: Any
    ) -> jax.Array:
        """Return the hidden states after the final norm, [B, T, D].

        Args:
            arrays: the trained arrays, the base, and the rows' dropout salts (`lora.row_salts`; None for no
                dropout). If there are no trained arrays, adapters are disabled, which gives the model that
                training started from.
            tokens, positions, segment_ids: int32[B, T].
        """
        inputs = {"input_ids": tokens, "position_ids": positions, "segment_ids": segment_ids}
        return self._decoded(arrays, inputs, arrays[2] is not None)

    def _decoded(
        self, arrays: tuple[Arrays, Arrays, jax.Array | None], inputs: Mapping[str, Any], training: bool
    ) -> jax.Array:
        """Call the decoder with these inputs; return [B, T, D]. `training` sets torch's mode."""
        trained, base, salts = arrays
        values = {**base, **{self.places[name]: array for name, array in trained.items()}}
        decoder: Any = self.module.model
        decoder.train(training)
        env = torchax.default_env()
        tensors = {
            name.removeprefix(PREFIX): env.j2t_iso(array)
            for name, array in spread(values).items()
            if name.startswith(PREFIX)
        }
        arguments = {**env.j2t_iso(dict(inputs)), "use_cache": False}
        with self._adapters(bool(trained)), _drawing(decoder, salts), env, torch.no_grad():
            out = torch.func.functional_call(decoder, tensors, (), arguments)
            return env.t2j_iso(env.v2t_iso(out.last_hidden_state))

    def head(self, arrays: tuple[Arrays, Arrays, jax.Array | None]) -> Head:
        """Return the output head: lm_head's weight, or the embedding if they are tied; [V, D] in torch."""
        trained, base, _ = arrays
        values = {**base, **{self.places[name]: array for name, array in trained.items()}}
        weight = values[HEAD] if HEAD in values else values[f"{PREFIX}embed_tokens.weight"]
        scale = getattr(self.architecture, "logit_scale", 1.0)
        bias = values.get(HEAD.replace("weight", "bias"))
        return Head(weight, True, softcap=self.softcap, cap_dtype=None, scale=scale, bias=bias)

    @contextmanager
    def _adapters(self, enabled: bool) -> Iterator[None]:
        """Enable or disable PEFT's adapters while the block traces."""
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
    """A model without a family of its own, computed only by transformers' code.

    Attention is transformers' eager one, which builds all scores [B, N, T, T] and the mask [B, 1, T, T].
    transformers separates the samples of a packed row by their positions. The model's own dropout is off; the
    adapters' dropout works as in any other model.
    """

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
    """Build the model with shapes instead of arrays. It allocates no weight, and uses no device.

    Args:
        config: values of config.json, of the whole checkpoint or of its text model.
        rules: the recipe's sharding rules.
        architecture: the family's description of the checkpoint; None to derive it from the config alone.

    Raises:
        UserError: the family is not known, or a rule does not fit.
    """
    family = family_of(config)
    architecture = architecture or family.architecture(config)
    axes = dict(mesh.shape)
    kind, began = settings.quantization, settings.began
    try:
        specs = tensor_specs(family, architecture, rules, axes)
        stored = {} if kind is None else tensor_layouts(family, architecture, rules, kind, axes, began)
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
    model_type = HfModel if family.tunix else AsItIs
    return model_type(
        module, family, architecture, adapters, trained, base, quantized, computed, places, softcap
    )


def load_base(model: HfModel, checkpoint: HFCheckpoint) -> Arrays:
    """Load the base's arrays onto their devices; return them by the module's names.

    Each shard is read from the checkpoint's file, cast and placed separately. A weight to quantize becomes
    codes and scales before the next one is read.

    Raises:
        UserError: the checkpoint lacks a tensor.
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
    """Load the initial values of full fine-tuning, in the same way as `load_base`."""
    return {name: _load(name, wanted, checkpoint) for name, wanted in model.trained.items()}


def with_reference(model: HfModel, base: Arrays, start: Arrays) -> Arrays:
    """Add the initial values of full fine-tuning to the base. Trained arrays override them; without trained
    arrays, the result is the model that training starts from.

    Args:
        start: by the names of `HfModel.trained`.
    """
    return {**base, **{model.places[name]: array for name, array in start.items()}}


def place_trained(model: HfModel, values: Mapping[str, Matrices]) -> Arrays:
    """Put adapters onto their devices.

    Args:
        values: A [rank, in] and B [out, rank] of each projection.
    """
    out: Arrays = {}
    for name, wanted in model.trained.items():
        module, letter = name.rsplit(".lora_", 1)
        out[name] = _place(wanted, values[module]["AB".index(letter)])
    return out


def tensor_name(name: str) -> str:
    """Return a tensor's name without prefix, as the families use it, from its name in the module."""
    return name.replace(BASE_LAYER, "").removeprefix(PREFIX)


def checkpoint_name(name: str, checkpoint: HFCheckpoint) -> str:
    """Return a tensor's full name in a checkpoint, from its name in the module."""
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
    """Build transformers' model with PEFT's adapters, and wrap its layers.

    Raises:
        UserError: no family describes the model, and transformers or PEFT rejects it.
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
            f"{config.get('model_type')}: transformers or PEFT does not accept it: {reason}",
            "if the reason is a module that cannot be adapted, leave it out of lora.targets",
        ) from error
    return module


def _module(config: Mapping[str, Any], settings: ModelSettings, attention: str) -> torch.nn.Module:
    """Build transformers' text model of a config: parameters on meta, computed buffers with their values.

    Args:
        attention: transformers' attn_implementation.
    """
    from peft.utils.integrations import init_empty_weights

    text = floats(dict(text_config(config)))
    built = transformers.AutoConfig.for_model(**text)
    if "tie_word_embeddings" in config:
        built.tie_word_embeddings = config["tie_word_embeddings"]
    with init_empty_weights(), _quiet():
        module = transformers.AutoModelForCausalLM.from_config(
            built, dtype=getattr(torch, settings.dtype), attn_implementation=attention
        )
    return module.requires_grad_(False)


def _attach(module: torch.nn.Module, adapters: Sequence[Adapter], lora: LoraSettings) -> None:
    """Add PEFT's LoRA layers to the recipe's projections."""
    import peft

    names = [adapter.name for adapter in adapters]
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
    """Return what is trained, and its names in the module. Without LoRA, remove it from `base`."""
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
        pair = zip("AB", adapter.peft_shapes, adapter_specs(specs[f"{adapter.name}.weight"]), strict=True)
        for letter, shape, spec in pair:
            name = f"{adapter.name}.lora_{letter}"
            place = sharding.named(mesh, divisible(shape, spec, mesh.shape))
            trained[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=place)
            places[name] = f"{PREFIX}{adapter.name}.lora_{letter}.default.weight"
    return trained, places


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


ROWS = ("fsdp", None, "tp")
"""The sharding of hidden states [B, T, D], the same as train.py's. Without it, XLA inserts many all-to-alls;
with unsharded features, each device of tp would compute all norms and all of the adapters' A."""


def _wrap(decoder: torch.nn.Module, remat: str) -> None:
    """Wrap every layer of a decoder (`model.model` of a causal LM), and its rotary embedding.

    Args:
        remat: the recipe's policy; "none" keeps every activation. "block" means "decoder" here.
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
            # What a layer adds for later layers (Gemma 4's keys and values) must be returned as a result.
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
        if isinstance(out, tuple):  # the hidden states, and further results of the layer
            return env.j2t_iso((sharding.constrain(out[0], ROWS), *out[1:]))
        return env.j2t_iso(sharding.constrain(out, ROWS))

    return run


def _name_projections(decoder: torch.nn.Module) -> None:
    """Give the outputs of a decoder's projections remat.py's name. The parts of an adapter get it too; an
    output that the backward pass does not need is not kept."""
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
    """Compute rotary angles in true float32. A TPU multiplies float32 in bfloat16 by default, and bfloat16
    cannot represent position 257."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return forward(*args, **kwargs)

    return run


class RowDropout(torch.nn.Module):
    """Replaces torch's dropout before a projection's A.

    Args:
        projection: "layers.0.self_attn.q_proj".
        rate: probability that an element is dropped.

    Attributes:
        salts: uint32[B] of the traced rows; None for no dropout.
    """

    def __init__(self, projection: str, rate: float) -> None:
        super().__init__()
        self.salts: jax.Array | None = None
        self._projection, self._rate = projection, rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop elements of x [B, T, D]."""
        if self.salts is None:
            return x
        env = torchax.default_env()
        out = dropped(env.t2j_iso(env.v2t_iso(x)), self.salts, self._projection, self._rate)
        return env.j2t_iso(out)


def _replace_dropout(module: torch.nn.Module, prefix: str) -> None:
    """Give every adapted projection its own dropout.

    Args:
        module: with PEFT's layers.
        prefix: of the projections' names in the module.
    """
    from peft.tuners.lora import LoraLayer

    for name, layer in module.named_modules():
        if isinstance(layer, LoraLayer):
            for adapter, dropout in layer.lora_dropout.items():
                if isinstance(dropout, torch.nn.Dropout):
                    layer.lora_dropout[adapter] = RowDropout(name.removeprefix(prefix), dropout.p)


@contextmanager
def _drawing(module: torch.nn.Module, salts: jax.Array | None) -> Iterator[None]:
    """Apply dropout by the rows' salts while the block traces a module."""
    places = [part for part in module.modules() if isinstance(part, RowDropout)]
    for place in places:
        place.salts = salts
    try:
        yield
    finally:
        for place in places:
            place.salts = None


class _Scores(NamedTuple):
    """How a layer computes scores: the scale, the window in tokens, and the cap, None for no such limit."""

    scale: float
    window: int | None
    softcap: float | None


def _register(settings: ModelSettings) -> str:
    """Register a recipe's attention with transformers.

    Returns:
        The attn_implementation to use. transformers builds no mask for a name without a mask function.
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
        """Return [B, T, N, H] from query [B, N, T, H] and key, value [B, K, T, H]."""
        q, k, v, segments = _arrays(query, key, value, options["segment_ids"])
        how = _Scores(options["scaling"], options.get("sliding_window"), options.get("softcap"))
        out = kernel(q, k, v, segments, how)
        return torchax.default_env().j2t_iso(out), None

    name = f"recipec_{settings.attention}_{block}"
    AttentionInterface.register(name, attend)
    return name


def _dot(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, how: _Scores) -> jax.Array:
    """Return [B, T, N, H] from q [B, T, N, H] and k, v [B, T, K, H]; scores and sums are float32."""
    mask = _visible(segments, how.window)
    if how.softcap is None:
        out = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], scale=how.scale)
    else:
        out = _soft_capped(q, k, v, mask, how.scale, how.softcap)
    return ad_checkpoint.checkpoint_name(out, ATTENTION)


def _splash(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, how: _Scores, most: int | None
) -> jax.Array:
    """Compute the same as `_dot` with the TPU's kernel, which itself names the values to keep."""
    return splash_in_scope(q * how.scale, k, v, segments, Scoring(how.window, how.softcap), most)


def _visible(segment_ids: jax.Array, window: int | None) -> jax.Array:
    """Return which tokens each token may attend to: bool[B, T, T], indexed by row, query and key.

    Args:
        segment_ids: int32[B, T], 0 for padding.
        window: how many tokens a token sees, including itself; None for all before it.
    """
    mask = attention_mask(segment_ids)
    if window is None:
        return mask
    at = jnp.arange(segment_ids.shape[1])
    return mask & (at[:, None] - at[None, :] < window)


def _soft_capped(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, scale: float, softcap: float
) -> jax.Array:
    """Compute Gemma 2's attention, whose scores become tanh(s / softcap) * softcap before the mask."""
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


@dataclass(frozen=True, kw_only=True)
class OwnHead(Head):
    """An output head that calls the model's own code after the decoder.

    Attributes:
        module: the causal language model.
        name: the head weight's name in the module.
        rest: other arrays outside the decoder, by their names.
    """

    module: torch.nn.Module
    name: str
    rest: Mapping[str, jax.Array]

    def logits(self, hidden: jax.Array, weight: jax.Array) -> jax.Array:
        """Return logits float32[B, T, V] from hidden [B, T, D]; the weight is sharded for this product."""
        env = torchax.default_env()
        tensors = env.j2t_iso({**self.rest, self.name: weight})
        states = env.j2t_iso(hidden)
        module = _with_states(self.module, states)
        with env, torch.no_grad():
            out = torch.func.functional_call(
                module, tensors, (), {"inputs_embeds": states, "use_cache": False}
            )
            logits: jax.Array = env.t2j_iso(env.v2t_iso(out.logits))
        return logits.astype(jnp.float32)


def _with_states(module: Any, states: Any) -> torch.nn.Module:
    """Return a causal language model whose decoder returns these hidden states instead of computing them.

    It is a shallow copy, which shares its weights with the model.
    """
    decoder, out = copy(module.model), copy(module)
    decoder.forward = lambda *_, **__: BaseModelOutputWithPast(last_hidden_state=states)
    out._modules = {**module._modules, PREFIX.rstrip("."): decoder}
    return out
