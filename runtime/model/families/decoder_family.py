"""Families that one decoder computes (runtime/model/decoder.py), each from its description.

A description lists what differs between decoders: places and kinds of norms, biases, which layers rotate how
much of a head, which layers see a window, multipliers, a gated or a plain feed-forward block, and fused
tensors. From it follow the arrays, the Hugging Face tensors that they are made of, and the weights that can
carry LoRA.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from ..rope import Rope
from .description import (
    ACTIVATIONS,
    AFTER,
    AROUND,
    LATENT,
    Conv,
    DecoderArchitecture,
    Delta,
    Experts,
    ExpertTensors,
    FullHeads,
    Growth,
    Latent,
    Mamba,
    Norm,
    Places,
    Scales,
)
from .family import (
    CHUNKED,
    FULL,
    LINEAR,
    NONE,
    SLIDING,
    TIE,
    Architecture,
    Family,
    LoraTarget,
    Names,
    Parameter,
    Source,
    Spec,
    UnsupportedCheckpoint,
    count,
    dense,
    integer,
    linear,
    listed_types,
    number,
    output_projection,
    plain,
    text_config,
    tie_setting,
)
from .rotary import read_ropes
from .towers import vision_of
from .vision import VisionArchitecture

__all__ = [
    "AFTER",
    "AROUND",
    "MULTIMODAL",
    "Conv",
    "DecoderArchitecture",
    "DecoderFamily",
    "Delta",
    "ExpertTensors",
    "Experts",
    "FullHeads",
    "Growth",
    "Latent",
    "Mamba",
    "Names",
    "Norm",
    "Places",
    "Scales",
]

DROPOUT = (
    *("attention_dropout", "embedding_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop"),
    *("hidden_dropout", "router_jitter_noise"),
)
"""Keys of config.json for dropout and noise within the model, which this decoder does not compute."""

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of config.json for a layer's experts: transformers saves some families under a key other than the one
they were published with."""

MULTIMODAL = ("model.language_model.", "language_model.model.", "model.")
"""Prefixes of the text tensors of a family that has multimodal checkpoints too, new and old."""


class DecoderFamily(Family):
    """A family whose model is runtime/model/decoder.py.

    A family gives its defaults, which are those of transformers' config class. If it differs from Llama, it
    overrides `describe`.

    Attributes:
        defaults: values for config.json's missing keys. Without num_key_value_heads there are as many as
            heads, without head_dim it is hidden_size / heads, and without hidden_act it is silu.
        biased: keys of config.json, each with the projections that have a bias if it is set; "" for those
            that always have one.
        full_every: all layers but every such one have a window; a number, or a key of config.json. None for
            a window in all layers if `sliding_window` is set.
        further: the key of config.json for `further_layers`; "" if checkpoints hold none.
        activation: the key of config.json for the activation.
        share: of a head's features that rotate by default; None if all of them always do.
        interleaved: whether the features that rotate together are neighbors.
    """

    prefixes: tuple[str, ...] = ("model.",)
    flash_attention = True
    defaults: ClassVar[Mapping[str, Any]]
    biased: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("attention_bias", ("q", "k", "v", "o")),
        ("mlp_bias", ("mlp",)),
    )
    full_every: int | str | None = None
    further = ""
    activation = "hidden_act"
    share: float | None = None
    interleaved = False

    def architecture(self, config: Mapping[str, Any]) -> DecoderArchitecture:
        """Read a config.json; a missing key has the default of transformers' config class."""
        text = text_config(config)
        nested = None if text is config else text.get("quantization_config")
        if nested is not None or not self.reads(config.get("quantization_config")):
            raise UnsupportedCheckpoint(
                "config.json: quantization_config says that the weights are stored quantized; "
                "train the original checkpoint",
                "quantization_config",
            )
        tie = tie_setting(config)
        values = {self.activation: "silu", **self.defaults, **text, **({} if tie is None else {TIE: tie})}
        left_out = tuple((key, number(values, key, 0.1)) for key in DROPOUT if values.get(key))
        return replace(self.describe(values), dropout=left_out)

    def architecture_of(
        self, config: Mapping[str, Any], tensors: Mapping[str, Sequence[int]]
    ) -> DecoderArchitecture:
        """Read as `architecture` does; tensors' names tell if experts are stored one by one or together, and
        the embedding's name.

        Args:
            tensors: empty if only config.json is known; they are then named as the family publishes them.
        """
        a = self.architecture(config)
        for name in self.names.embeddings:
            if any(f"{prefix}{name}.weight" in tensors for prefix in self.prefixes):
                a = replace(a, embedding=name)
        if a.experts is None or not tensors:
            return a
        names = a.experts.tensors
        # Only the decoder's own layers: the others (mtp.*) may store their experts differently.
        firsts = [f"layers.{i}.{names.block}.{names.expert[-1].format(0)}" for i in range(a.num_layers)]
        apart = any(f"{prefix}{first}" in tensors for prefix in self.prefixes for first in firsts)
        return replace(a, experts=replace(a.experts, tensors=replace(names, apart=apart)))

    def vision(self, config: Mapping[str, Any], tensors: Iterable[str] = ()) -> VisionArchitecture | None:
        return vision_of(config, self.architecture(config), tensors)

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        """Return the description of a config.json with its defaults filled in.

        Args:
            different: fields in which a family differs from Llama.
        """
        hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
        values = {key: value for key, value in config.items() if value is not None}
        kv_heads = integer(values, "num_key_value_heads", heads)
        if "head_dim" not in values and hidden % heads:
            raise UnsupportedCheckpoint(
                f"config.json: hidden_size is {hidden}, which {heads} heads do not divide without a head_dim",
                "hidden_size",
            )
        head_dim = integer(values, "head_dim", hidden // heads)
        if head_dim % 2:
            raise UnsupportedCheckpoint(
                f"config.json: head_dim is {head_dim}; rotary embeddings need an even one", "head_dim"
            )
        if heads % kv_heads:
            raise UnsupportedCheckpoint(
                f"config.json: num_key_value_heads is {kv_heads}, which does not divide {heads} heads",
                "num_key_value_heads",
            )
        activation = config.get(self.activation)
        if activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise UnsupportedCheckpoint(
                f"config.json: {self.activation} is {activation!r}; known are {known}", self.activation
            )
        layer_types = different.pop("layer_types", None) or self.layer_types(config)
        turns = different.get("turns") or (True,) * len(layer_types)
        turned = [
            k for k, turned in zip(layer_types, turns, strict=True) if turned and k not in (LINEAR, NONE)
        ]
        ropes = self.ropes(config, turned, head_dim)
        fields: dict[str, Any] = {
            "tied": flag(config, TIE),
            "norm": Norm(number(config, "rms_norm_eps", 1e-6)),
            "places": Places(),
            "ropes": tuple(ropes.items()),
            "sliding_window": integer(config, "sliding_window") if SLIDING in layer_types else None,
            "chunk": integer(config, "attention_chunk_size") if CHUNKED in layer_types else None,
            "attention_scale": head_dim**-0.5,
            "biases": self.biases(config),
            "activation": activation,
        }
        return DecoderArchitecture(
            family=self.name,
            vocab_size=integer(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=integer(config, "intermediate_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            layer_types=layer_types,
            **{**fields, **different},
        )

    def ropes(self, config: Mapping[str, Any], kinds: Sequence[str], head_dim: int) -> Mapping[str, Rope]:
        """Return the rotation of each kind of layer that rotates."""
        return read_ropes(
            config, kinds, self.title, head_dim=head_dim, share=self.share, interleaved=self.interleaved
        )

    def biases(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the projections with a bias."""
        return tuple(name for key, names in self.biased if not key or flag(config, key) for name in names)

    def layer_types(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return FULL or SLIDING for each layer: from `layer_types`, else by `full_every`."""
        layers, every = integer(config, "num_hidden_layers"), self.full_every
        if config.get("layer_types") is not None:
            return listed_types(config["layer_types"], layers)
        if every is None:
            return (SLIDING if config.get("sliding_window") is not None else FULL,) * layers
        period = integer(config, every) if isinstance(every, str) else every
        return tuple(SLIDING if (i + 1) % period else FULL for i in range(layers))

    def further_layers(self, config: Mapping[str, Any]) -> int:
        return count(config, self.further) if self.further else 0

    def norm_offset(self, architecture: Architecture) -> float:
        return described(architecture).norm.offset

    def parameters(self, architecture: Architecture) -> list[Parameter]:
        a = described(architecture)
        d = a.hidden_size
        names = self.names
        embedding = plain(f"{a.embedding or names.embedding}.weight", (a.vocab_size, d))
        out = [Parameter("embedder.input_embedding", (a.vocab_size, d), ("tp", "fsdp"), (embedding,))]
        for i in range(a.num_layers):
            out += self.layer(a, i)
        if a.per_layer_input:
            out += _per_layer_embeddings(a)
        out += _norm(a.norm, "final_norm", names.norm, d)
        if not a.tied:
            head = linear(f"{names.head}.weight", d, a.vocab_size, whole=True)
            out.append(Parameter("lm_head.w", (d, a.vocab_size), ("fsdp", "tp"), (head,)))
            if "head" in a.biases:
                size = (a.vocab_size,)
                bias = replace(plain(f"{names.head}.bias", size), whole=True)
                out.append(Parameter("lm_head.bias", size, ("tp",), (bias,)))
        if a.vision is not None:
            out += a.vision.frozen()
        return out

    def layer(self, a: DecoderArchitecture, i: int) -> list[Parameter]:
        """Return the arrays of a layer."""
        layer, called, parts = f"layers.{i}", f"{self.names.layers}.{i}", a.parts(i)
        out = []
        if "mamba" in parts and (m := a.mamba) is not None:
            out += (_mamba1 if m.rank else _mamba)(a, m, self.names, i)
        if "conv" in parts:
            out += _conv(a, self.names, i)
        if "delta" in parts or "attention" in parts:
            out += self.attention(a, i)
        if (experts := a.experts_of(i)) is not None:
            out += _mixture(a, experts, layer, self.names)
        if "mlp" in parts and a.replaced_by(i) is None:
            block = f"{called}.{self.feed_forward(a)}"
            out += _mlp(a, f"{layer}.mlp", block, self.names, a.mlp_features(i))
        for name in a.places.names:
            out += _norm(a.norm, f"{layer}.{name}", f"{called}.{name}", a.hidden_size)
        if a.per_layer_input:
            out += _per_layer_input(a, layer, called)
        if a.layer_scalar:
            scalar = plain(f"{called}.layer_scalar", (1,))
            out.append(Parameter(f"{layer}.layer_scalar", (1,), (None,), (scalar,), buffer=True))
        return out

    def attention(self, a: DecoderArchitecture, i: int) -> list[Parameter]:
        """Return the arrays of a layer's attention."""
        if "delta" in a.parts(i):
            return _delta(a, self.names, i)
        names = self.names
        if a.latent is not None:
            return _latent(a, i)
        path, name = f"layers.{i}.attn", f"{names.layers}.{i}.{names.attention}"
        d, n, k, h = a.hidden_size, a.num_heads, a.kv_heads(i), a.layer_head_dim(i)
        widths = {"q": n, "k": k, "v": k}
        projected = {letter: widths[letter] for letter in a.projections(i)}
        out = []
        if "qkv" in a.fused:
            projected = {"qkv": n + 2 * k}
        if "groups" in a.fused:
            projected, out = {}, _groups(a, f"{path}.qkv_proj", f"{name}.{names.qkv}")
        for letter, heads in projected.items():
            wide = a.query_width(i) if letter == "q" else h
            called = f"{name}.{names.qkv}" if letter == "qkv" else f"{name}.{letter}_proj"
            out.append(_projection(f"{path}.{letter}_proj", called, d, heads, wide))
            if letter in a.biases:
                out.append(_heads(f"{path}.{letter}_proj.bias", f"{called}.bias", heads, wide))
        if a.gate_apart:
            out.append(_projection(f"{path}.gate_proj", f"{name}.gate_proj", d, n, h))
        source = output_projection(f"{name}.{names.out}.weight", n, h, d)
        out.append(Parameter(f"{path}.o_proj.w", (n, h, d), ("tp", None, "fsdp"), (source,)))
        if "o" in a.biases:
            out.append(_vector(f"{path}.o_proj.bias", f"{name}.{names.out}.bias", d))
        if a.sinks:
            out.append(_vector(f"{path}.sinks", f"{name}.sinks", n))
        for letter, called in zip("qk", names.qk_norms, strict=True) if a.qk_norm else ():
            if letter == "k" and a.shares_kv(i):
                continue
            norm = f"{path}.{letter}_norm.w", f"{name}.{called}.weight"
            if a.qk_norm == "each":
                tensors = (f"{name}.{letter}_layernorm.norms.{i}.weight" for i in range(widths[letter]))
                sources = tuple(plain(tensor, (h,)) for tensor in tensors)
                out.append(Parameter(norm[0], (widths[letter], h), ("tp", None), sources))
            else:
                out.append(_heads(*norm, widths[letter], h) if a.qk_norm == "row" else _vector(*norm, h))
        return out

    def feed_forward(self, architecture: Architecture) -> str:
        experts = described(architecture).experts
        return self.names.mlp if experts is None or experts.added else experts.tensors.block

    def lora_targets(self, architecture: Architecture) -> list[LoraTarget]:
        a = described(architecture)
        names, out = self.names, []
        for i in range(a.num_layers):
            layer = f"layers.{i}"
            for module, hf, weight in _mixers(a, names, i):
                contract = (0, 1) if weight.endswith((".o_proj.w", ".out_proj.w")) else (0,)
                out.append(
                    LoraTarget(i, f"{layer}.{weight}", contract, f"{module}.{hf}", holder=names.layers)
                )
            experts, block, path = a.replaced_by(i), self.feed_forward(a), f"{layer}.mlp"
            latent = LATENT if experts is not None and experts.latent else ()
            fed = [(f"{path}.{name}.kernel", f"{block}.{name}") for name in latent]
            if experts is not None:
                block, path = experts.tensors.shared_module, f"{path}.shared"
            if "mlp" in a.parts(i) and (experts is None or experts.shared):
                both = _mlp_names(a, names)
                fed += [(f"{path}.{name}.kernel", f"{block}.{hf}") for name, hf in both]
            for kernel, projection in fed:
                out.append(LoraTarget(i, kernel, (0,), projection, holder=names.layers))
        return out

    def expert_targets(self, architecture: Architecture) -> list[LoraTarget]:
        a = described(architecture)
        layers = ((i, a.experts_of(i)) for i in range(a.num_layers))
        return [
            target for i, experts in layers if experts is not None for target in _mixture_targets(experts, i)
        ]


def described(architecture: Architecture) -> DecoderArchitecture:
    assert isinstance(architecture, DecoderArchitecture)
    return architecture


def flag(config: Mapping[str, Any], key: str) -> bool:
    """Read a yes or no of config.json; no if the key is missing or null."""
    value = config.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise UnsupportedCheckpoint(f"config.json: {key} is {value!r}, neither true nor false", key)
    return value


def windowed_late(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the layer types as transformers' Qwen2Config does: if `use_sliding_window` is set, a window in
    the layers that `layer_types` names, or in those from `max_window_layers` on."""
    layers = integer(config, "num_hidden_layers")
    used = flag(config, "use_sliding_window") and config.get("sliding_window") is not None
    if config.get("layer_types") is not None:
        return windowed_as_listed(config, used)
    if not used:
        return (FULL,) * layers
    first = config.get("max_window_layers")
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise UnsupportedCheckpoint(
            f"config.json: max_window_layers is {first!r}, not a number of layers", "max_window_layers"
        )
    return tuple(SLIDING if i >= first else FULL for i in range(layers))


def windowed_as_listed(config: Mapping[str, Any], used: bool) -> tuple[str, ...]:
    """Return the layer types that `layer_types` lists.

    Args:
        used: whether the window is enabled.

    Raises:
        UnsupportedCheckpoint: when a layer has a window that is not enabled.
    """
    types = listed_types(config["layer_types"], integer(config, "num_hidden_layers"))
    if SLIDING in types and not used:
        raise UnsupportedCheckpoint(
            f"config.json: layer_types gives layer {types.index(SLIDING)} a sliding window, "
            "and use_sliding_window is not set",
            "layer_types",
        )
    return types


def turning(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return which layers rotate: those where `no_rope_layers` has a 1."""
    layers = integer(config, "num_hidden_layers")
    flags = config.get("no_rope_layers")
    if flags is None:
        interval = integer(config, "no_rope_layer_interval")
        return tuple((i + 1) % interval != 0 for i in range(layers))
    if (
        not isinstance(flags, list | tuple)
        or len(flags) < layers
        or not all(turns in (0, 1) for turns in flags)
    ):
        raise UnsupportedCheckpoint(
            f"config.json: no_rope_layers does not hold a 0 or a 1 for each of {layers} layers",
            "no_rope_layers",
        )
    return tuple(bool(turns) for turns in flags[:layers])


def chosen(config: Mapping[str, Any], default: int) -> tuple[int, int]:
    """Return the experts of a layer, and how many of them a token goes through.

    Args:
        default: the number of experts if no key of EXPERT_KEYS is given.

    Raises:
        UnsupportedCheckpoint: when there are fewer experts than a token should go through.
    """
    key = next((key for key in EXPERT_KEYS if config.get(key) is not None), EXPERT_KEYS[0])
    count, per_token = integer(config, key, default), integer(config, "num_experts_per_tok")
    if per_token > count:
        raise UnsupportedCheckpoint(
            f"config.json: num_experts_per_tok is {per_token}, of {count} experts", "num_experts_per_tok"
        )
    return count, per_token


def routed_every(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return which layers have experts: every `decoder_sparse_step`-th, except `mlp_only_layers`."""
    layers, step = integer(config, "num_hidden_layers"), integer(config, "decoder_sparse_step")
    dense = config.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or not all(isinstance(i, int) and 0 <= i < layers for i in dense):
        raise UnsupportedCheckpoint(
            f"config.json: mlp_only_layers is {dense!r}, not some of {layers} layers", "mlp_only_layers"
        )
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))


def features_first(name: str, heads: int, head_dim: int, hidden: int) -> Source:
    """Describe a query, key or value weight: [heads * head_dim, hidden] becomes [hidden, heads, head_dim]."""
    return Source(name, (heads * head_dim, hidden), (heads, head_dim, hidden), (2, 0, 1))


def _projection(path: str, name: str, hidden: int, heads: int, head_dim: int) -> Parameter:
    """Return the weight that projects the residual stream to heads. A single head is whole on each device."""
    source = features_first(f"{name}.weight", heads, head_dim, hidden)
    spec = "fsdp", None if heads == 1 else "tp", None
    return Parameter(f"{path}.w", (hidden, heads, head_dim), spec, (source,))


def _mixers(a: DecoderArchitecture, names: Names, i: int) -> Iterator[tuple[str, str, str]]:
    """Yield a layer's projections outside of its feed-forward block: their module, Hugging Face's name, and
    the path of their weight in the layer."""
    parts = a.parts(i)
    if "mamba" in parts and a.mamba is not None:
        yield names.mamba, "in_proj", "mamba.in_proj.kernel"
        for name in ("x_proj", "dt_proj") if a.mamba.rank else ():
            yield names.mamba, name, f"mamba.{name}.kernel"
        if not a.mamba.closed:
            yield names.mamba, "out_proj", f"mamba.out_proj.{'kernel' if a.mamba.rank else 'w'}"
    if "conv" in parts:
        for name in ("in_proj", "out_proj"):
            yield names.conv, name, f"conv.{name}.kernel"
    if "delta" in parts:
        for name, features in a.delta_projections.items():
            yield names.delta, name, f"attn.{name}.{'kernel' if len(features) == 1 else 'w'}"
        yield names.delta, "out_proj", "attn.out_proj.w"
    if "attention" in parts:
        for name, called in _attention_names(a, names, i).items():
            flat = len(a.latent_projections.get(name, ())) == 2
            yield names.attention, called, f"attn.{name}.{'kernel' if flat else 'w'}"


def _attention_names(a: DecoderArchitecture, names: Names, i: int) -> dict[str, str]:
    """Return the names of the projections of a layer's attention, here and Hugging Face's."""
    fused = "qkv" in a.fused or "groups" in a.fused
    out = (
        {"qkv_proj": names.qkv}
        if fused
        else {f"{projection}_proj": f"{projection}_proj" for projection in a.projections(i)}
    )
    if a.latent is not None:
        out = {name: name for name in a.latent_projections}
    if a.gate_apart:
        out["gate_proj"] = "gate_proj"
    return {**out, "o_proj": names.out}


def _mamba(a: DecoderArchitecture, m: Mamba, names: Names, i: int) -> list[Parameter]:
    """Return the arrays of a layer's Mamba 2 mixer."""
    path, name = f"layers.{i}.mamba", f"{names.layers}.{i}.{names.mamba}"
    d, features, taps = a.hidden_size, sum(m.projected), (m.convolved, m.taps)
    into, back = f"{name}.in_proj", f"{name}.out_proj"
    conv = Source(f"{name}.conv1d.weight", (m.convolved, 1, m.taps), taps, (0, 1))
    output = f"{path}.out_proj"
    out = [
        dense(f"{path}.in_proj.kernel", into, (d, features), ("fsdp", "tp")),
        Parameter(f"{path}.conv1d", taps, ("tp", None), (conv,)),
        *(_vector(f"{path}.{called}", f"{name}.{called}", m.heads) for called in ("A_log", "D", "dt_bias")),
    ]
    if "in" in m.biases:
        out.append(_vector(f"{path}.in_proj.bias", f"{into}.bias", features))
    if "conv" in m.biases:
        out.append(_vector(f"{path}.conv1d_bias", f"{name}.conv1d.bias", m.convolved))
    if m.norm_parts:
        out.append(_vector(f"{path}.norm", f"{name}.norm.weight", m.inner))
    source = output_projection(f"{back}.weight", m.heads, m.head_dim, d)
    out.append(Parameter(f"{output}.w", (m.heads, m.head_dim, d), ("tp", None, "fsdp"), (source,)))
    return [*out, _vector(f"{output}.bias", f"{back}.bias", d)] if "out" in m.biases else out


def _mamba1(a: DecoderArchitecture, m: Mamba, names: Names, i: int) -> list[Parameter]:
    """Return the arrays of a layer's Mamba 1 mixer."""
    path, name = f"layers.{i}.mamba", f"{names.layers}.{i}.{names.mamba}"
    d, inner, features = a.hidden_size, m.inner, sum(m.selected.values())
    source = Source(f"{name}.in_proj.weight", (2 * inner, d), (2, inner, d), (2, 0, 1))
    conv = Source(f"{name}.conv1d.weight", (inner, 1, m.taps), (inner, m.taps), (0, 1))
    rates = plain(f"{name}.A_log", (inner, m.state))
    out = [
        Parameter(f"{path}.in_proj.kernel", (d, 2, inner), ("fsdp", None, "tp"), (source,)),
        Parameter(f"{path}.conv1d", (inner, m.taps), ("tp", None), (conv,)),
        Parameter(f"{path}.A_log", (inner, m.state), ("tp", None), (rates,)),
        _vector(f"{path}.D", f"{name}.D", inner),
        _vector(f"{path}.dt_proj.bias", f"{name}.dt_proj.bias", inner),
    ]
    for norm, size in m.selected.items():
        out.append(
            Parameter(f"{path}.{norm}.w", (size,), (None,), (plain(f"{name}.{norm}.weight", (size,)),))
        )
    for parameter, shape, spec in (
        ("x_proj", (inner, features), ("tp", "fsdp")),
        ("dt_proj", (m.rank, inner), ("fsdp", "tp")),
        ("out_proj", (inner, d), ("tp", "fsdp")),
    ):
        out.append(dense(f"{path}.{parameter}.kernel", f"{name}.{parameter}", shape, spec))
    if "in" in m.biases:
        source = Source(f"{name}.in_proj.bias", (2 * inner,), (2, inner), (0, 1))
        out.append(Parameter(f"{path}.in_proj.bias", (2, inner), (None, "tp"), (source,)))
    if "conv" in m.biases:
        out.append(_vector(f"{path}.conv1d_bias", f"{name}.conv1d.bias", inner))
    return [*out, _vector(f"{path}.out_proj.bias", f"{name}.out_proj.bias", d)] if "out" in m.biases else out


def _conv(a: DecoderArchitecture, names: Names, i: int) -> list[Parameter]:
    """Return the arrays of a layer's gated short convolution."""
    path, name, conv = f"layers.{i}.conv", f"{names.layers}.{i}.{names.conv}", a.conv
    assert conv is not None
    d, taps = a.hidden_size, (a.hidden_size, conv.taps)
    source = Source(f"{name}.in_proj.weight", (3 * d, d), (3, d, d), (2, 0, 1))
    kernel = Source(f"{name}.conv.weight", (d, 1, conv.taps), taps, (0, 1))
    out = [
        Parameter(f"{path}.in_proj.kernel", (d, 3, d), ("fsdp", None, "tp"), (source,)),
        Parameter(f"{path}.conv1d", taps, ("tp", None), (kernel,)),
        dense(f"{path}.out_proj.kernel", f"{name}.out_proj", (d, d), ("tp", "fsdp")),
    ]
    if conv.bias:
        source = Source(f"{name}.in_proj.bias", (3 * d,), (3, d), (0, 1))
        out.append(Parameter(f"{path}.in_proj.bias", (3, d), (None, "tp"), (source,)))
        out.append(_vector(f"{path}.conv1d_bias", f"{name}.conv.bias", d))
        out.append(_vector(f"{path}.out_proj.bias", f"{name}.out_proj.bias", d))
    return out


def _groups(a: DecoderArchitecture, path: str, name: str) -> list[Parameter]:
    """Return the arrays of a projection that makes each key head's queries, its key and its value."""
    d, rows = a.hidden_size, (a.num_kv_heads, a.num_heads // a.num_kv_heads + 2, a.head_dim)
    source = Source(f"{name}.weight", (math.prod(rows), d), (*rows, d), (3, 0, 1, 2))
    out = [Parameter(f"{path}.w", (d, *rows), ("fsdp", "tp", None, None), (source,))]
    if "q" in a.biases:
        bias = Source(f"{name}.bias", (math.prod(rows),), rows, (0, 1, 2))
        out.append(Parameter(f"{path}.bias", rows, ("tp", None, None), (bias,)))
    return out


def _delta(a: DecoderArchitecture, names: Names, i: int) -> list[Parameter]:
    """Return the arrays of a layer's gated delta net."""
    path, name = f"layers.{i}.attn", f"{names.layers}.{i}.{names.delta}"
    assert a.delta is not None
    d, n, h, channels = a.hidden_size, a.delta.value_heads, a.delta.value_dim, a.delta.features
    into = []
    for projection, features in a.delta_projections.items():
        if len(features) == 2:
            into.append(_projection(f"{path}.{projection}", f"{name}.{projection}", d, *features))
            continue
        kernel = f"{path}.{projection}.kernel"
        into.append(dense(kernel, f"{name}.{projection}", (d, features[0]), ("fsdp", "tp")))
    taps = (channels, a.delta.taps)
    conv = Source(f"{name}.conv1d.weight", (channels, 1, a.delta.taps), taps, (0, 1))
    out_proj = output_projection(f"{name}.out_proj.weight", n, h, d)
    return [
        *into,
        Parameter(f"{path}.conv1d", taps, ("tp", None), (conv,)),
        _vector(f"{path}.A_log", f"{name}.A_log", n),
        _vector(f"{path}.dt_bias", f"{name}.dt_bias", n),
        _vector(f"{path}.norm.w", f"{name}.norm.weight", h),
        Parameter(f"{path}.out_proj.w", (n, h, d), ("tp", None, "fsdp"), (out_proj,)),
    ]


def _latent(a: DecoderArchitecture, i: int) -> list[Parameter]:
    """Return the arrays of a layer's latent attention. Compressed features are whole on each device of tp."""
    path, name = f"layers.{i}.attn", f"layers.{i}.self_attn"
    out = []
    for projection, shape in a.latent_projections.items():
        if len(shape) == 3:
            out.append(_projection(f"{path}.{projection}", f"{name}.{projection}", *shape))
            continue
        kernel = f"{path}.{projection}.kernel"
        out.append(dense(kernel, f"{name}.{projection}", (shape[0], shape[1]), ("fsdp", None)))
    for norm, features in a.latent_norms.items():
        out.append(_vector(f"{path}.{norm}.w", f"{name}.{norm}.weight", features))
    heads = a.num_heads, a.value_dim(i), a.hidden_size
    source = output_projection(f"{name}.o_proj.weight", *heads)
    return [*out, Parameter(f"{path}.o_proj.w", heads, ("tp", None, "fsdp"), (source,))]


def _vector(path: str, name: str, size: int) -> Parameter:
    return Parameter(path, (size,), ("tp",), (plain(name, (size,)),))


def _heads(path: str, name: str, heads: int, head_dim: int) -> Parameter:
    """Return a vector over all features of all heads, as [heads, head_dim]."""
    source = Source(name, (heads * head_dim,), (heads, head_dim), (0, 1))
    return Parameter(path, (heads, head_dim), ("tp", None), (source,))


def _norm(norm: Norm, path: str, name: str, size: int) -> list[Parameter]:
    out = [_vector(f"{path}.w", f"{name}.weight", size)] if norm.weighted else []
    return [*out, _vector(f"{path}.bias", f"{name}.bias", size)] if norm.bias else out


def _mlp_names(a: DecoderArchitecture, names: Names) -> list[tuple[str, str]]:
    """Return the names of a feed-forward block's projections, here and Hugging Face's."""
    if not a.gated:
        return list(zip(Names.plain, names.plain, strict=True))
    if "gate_up" in a.fused:
        return list(zip(Names.joined, names.joined, strict=True))
    return list(zip(Names.gated, names.gated, strict=True))


def _mlp(a: DecoderArchitecture, path: str, module: str, names: Names, features: int = 0) -> list[Parameter]:
    """Return the arrays of a feed-forward block. A fused gate and up are [hidden, 2, intermediate].

    Args:
        path, module: of the block, here and in Hugging Face's names.
        features: within it; 0 for the architecture's own number.
    """
    d, f = a.hidden_size, features or a.intermediate_size
    *into, out_of = _mlp_names(a, names)
    out = []
    for name, called in into:
        weight, hf = f"{path}.{name}", f"{module}.{called}"
        if name == "gate_up_proj":
            source = Source(f"{hf}.weight", (2 * f, d), (2, f, d), (2, 0, 1))
            out.append(Parameter(f"{weight}.kernel", (d, 2, f), ("fsdp", None, "tp"), (source,)))
        else:
            out.append(dense(f"{weight}.kernel", hf, (d, f), ("fsdp", "tp")))
        if "mlp" in a.biases:
            out.append(_vector(f"{weight}.bias", f"{hf}.bias", f))
    weight, hf = f"{path}.{out_of[0]}", f"{module}.{out_of[1]}"
    out.append(dense(f"{weight}.kernel", hf, (f, d), ("tp", "fsdp")))
    if "mlp" in a.biases:
        out.append(_vector(f"{weight}.bias", f"{hf}.bias", d))
    return [*out, *_xielu(path, f"{module}.act_fn")] if a.activation == "xielu" else out


def _xielu(path: str, module: str) -> list[Parameter]:
    """Return an activation's learned numbers, and its constants, which have no axes in a checkpoint."""
    out = []
    for name, shape in (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ())):
        source = Source(f"{module}.{name}", shape, (1,), (0,))
        out.append(Parameter(f"{path}.{name}", (1,), (None,), (source,), buffer=not shape))
    return out


def _per_layer_embeddings(a: DecoderArchitecture) -> list[Parameter]:
    """Return the arrays of what all layers' own inputs are made from: the table [V, L, P] of embeddings, and
    a projection of the model's embeddings with its norm."""
    d, layers, width = a.hidden_size, a.num_layers, a.per_layer_input
    table, name = (a.vocab_size, layers, width), "per_layer_model_projection"
    rows = Source("embed_tokens_per_layer.weight", (a.vocab_size, layers * width), table, (0, 1, 2))
    into = Source(f"{name}.weight", (layers * width, d), (layers, width, d), (2, 0, 1))
    return [
        Parameter("embedder.per_layer_input_embedding", table, ("tp", None, "fsdp"), (rows,)),
        Parameter(f"embedder.{name}.w", (d, layers, width), ("fsdp", None, "tp"), (into,)),
        *_norm(a.norm, "embedder.per_layer_projection_norm", "per_layer_projection_norm", width),
    ]


def _per_layer_input(a: DecoderArchitecture, layer: str, called: str) -> list[Parameter]:
    """Return the arrays by which a layer reads its own input."""
    d, width = a.hidden_size, a.per_layer_input
    gate, back = "per_layer_input_gate", "per_layer_projection"
    return [
        dense(f"{layer}.{gate}.kernel", f"{called}.{gate}", (d, width), ("fsdp", "tp")),
        dense(f"{layer}.{back}.kernel", f"{called}.{back}", (width, d), ("tp", "fsdp")),
        *_norm(a.norm, f"{layer}.post_per_layer_input_norm", f"{called}.post_per_layer_input_norm", d),
    ]


def _mixture(a: DecoderArchitecture, experts: Experts, layer: str, called: Names) -> list[Parameter]:
    """Return the arrays of a layer's experts, of their router and of the shared expert."""
    d, e, f, names = a.hidden_size, experts.count, experts.size, experts.tensors
    wide, halves = experts.latent or d, 2 if a.gated else 1
    path, module = f"{layer}.{mixture(experts)}", f"{layer}.{names.block}".rstrip(".")
    router = f"{module}.{names.router}"
    out = [dense(f"{path}.router.kernel", router, (d, e), (None, None))]
    if experts.biases:
        out.append(Parameter(f"{path}.router.bias", (e,), (None,), (plain(f"{router}.bias", (e,)),)))
    if experts.added:
        inputs, outputs = (
            plain(f"{module}.router.scale", (d,)),
            plain(f"{module}.router.per_expert_scale", (e,)),
        )
        out.append(Parameter(f"{path}.router_scale", (d,), (None,), (inputs,)))
        out.append(Parameter(f"{path}.per_expert_scale", (e,), (None,), (outputs,)))
    if experts.correction:
        shape = (1, e) if names.boxed else (e,)
        source = Source(f"{module}.{names.correction}", shape, (e,), (0,))
        out.append(Parameter(f"{path}.correction", (e,), (None,), (source,), buffer=True, wide=True))
    if names.apart:
        *ups, down = (f"{module}.{name}" for name in names.expert)
        into = tuple(linear(pattern.format(i), wide, f) for i in range(e) for pattern in ups)
        back = tuple(linear(down.format(i), f, wide) for i in range(e))
        stack: tuple[int, ...] = (0, 2)
    else:
        both, down = (f"{module}.{name}" for name in names.together)
        into, back, stack = (_up(both, names, (e, wide, halves, f)),), (_down(down, names, e, wide, f),), (0,)
    spec: Spec = ("ep", "fsdp", None, "tp")
    out.append(Parameter(f"{path}.experts.gate_up", (e, wide, halves, f), spec, into, stack=stack))
    out.append(Parameter(f"{path}.experts.down", (e, f, wide), ("ep", "tp", "fsdp"), back))
    for name, sizes, over in zip(
        LATENT, ((d, wide), (wide, d)), (("fsdp", None), (None, "fsdp")), strict=True
    ):
        if experts.latent:
            out.append(dense(f"{path}.{name}.kernel", f"{module}.{name}", sizes, over))
    if experts.biases:
        both, down = (f"{module}.{name}_bias" for name in names.together)
        split = (2, f) if not names.alternate else (f, 2)
        order = (0, 1, 2) if not names.alternate else (0, 2, 1)
        source = Source(both, (e, 2 * f), (e, *split), order)
        out.append(Parameter(f"{path}.experts.gate_up_bias", (e, 2, f), ("ep", None, "tp"), (source,)))
        out.append(Parameter(f"{path}.experts.down_bias", (e, d), (None, None), (plain(down, (e, d)),)))
    if experts.shared:
        out += _mlp(a, f"{path}.shared", f"{layer}.{names.shared_module}", called, experts.shared)
    if experts.shared_gate:
        gate = f"{layer}.{names.shared_module}_gate"
        out.append(dense(f"{path}.shared_gate.kernel", gate, (d, 1), (None, None)))
    return out


def mixture(experts: Experts) -> str:
    """Return the name of the experts' module in a layer of runtime/model/decoder.py."""
    return "moe" if experts.added else "mlp"


def _mixture_targets(experts: Experts, i: int) -> list[LoraTarget]:
    """Return a layer's router and experts as LoRA targets, with transformers' names."""
    names, path = experts.tensors, f"layers.{i}.{mixture(experts)}"
    module = names.held or names.block
    router, both, down = (f"{module}.{name}".lstrip(".") for name in (names.router, *names.together))
    weight = "" if names.linear_router else f"{router}.weight"
    out = [
        LoraTarget(i, f"{path}.router.kernel", (0,), router, words=_words("router", router), parameter=weight)
    ]
    for name, parameter in (("gate_up", both), ("down", down)):
        projection = parameter.removesuffix(".weight")
        out.append(
            LoraTarget(
                i,
                f"{path}.experts.{name}",
                (1,),
                projection,
                experts=experts.count,
                alternate=names.alternate and name == "gate_up",
                swapped=names.swapped,
                # Next to the block, the shared expert's projections may have the same names.
                words=_words("experts", module if names.beside else projection),
                parameter=parameter,
            )
        )
    return out


def _words(word: str, module: str) -> tuple[str, ...]:
    """Return the words for a router or experts in a recipe's target."""
    return (word,) if word in module else (word, module.rpartition(".")[2])


def _up(name: str, names: ExpertTensors, shape: tuple[int, int, int, int]) -> Source:
    """Describe the tensor that becomes all experts' gate and up, [E, D, 2, F], or only up, [E, D, 1, F]."""
    e, d, n, f = shape
    halves = (f, n) if names.alternate else (n, f)
    if names.inputs_first:
        order = (0, 1, 3, 2) if names.alternate else (0, 1, 2, 3)
        return Source(name, (e, d, n * f), (e, d, *halves), order)
    order = (0, 3, 2, 1) if names.alternate else (0, 3, 1, 2)
    return Source(name, (e, n * f, d), (e, *halves, d), order)


def _down(name: str, names: ExpertTensors, e: int, d: int, f: int) -> Source:
    """Describe the tensor that becomes all experts' down, [E, F, D]."""
    if names.inputs_first:
        return Source(name, (e, f, d), (e, f, d), (0, 1, 2))
    return Source(name, (e, d, f), (e, d, f), (0, 2, 1))
