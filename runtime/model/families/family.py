"""What the compiler and the runtime know about a model family.

Each family is one module in this package. From a checkpoint's config.json it tells which arrays the
model has, their shapes and shardings, and from which Hugging Face tensors each is made. Loading, LoRA,
merging and the compiler's checks all read this one description. Nothing here imports jax or numpy, so that
the compiler can use it on any machine.
"""

from __future__ import annotations

import functools
import math
import re
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from .description import State
    from .vision import VisionArchitecture

Spec = tuple[str | None, ...]
"""The mesh axis that each dimension of an array is split over, or None: a PartitionSpec's entries."""

FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"
CHUNKED = "chunked_attention"
HYBRID = "hybrid"
NONE = "none"
"""Kinds of attention of a layer, with transformers' names. A LINEAR layer carries a state from token to
token. A HYBRID one has full attention and a state. A layer of kind NONE has only a feed-forward block."""

TIE = "tie_word_embeddings"
"""The key of config.json that says whether the output head is the embedding."""

MOST_LAYERS = 1000
"""The most layers of a config.json; more would take minutes to process, and no model has them."""

MOST = 2**31 - 1
"""The largest value of any size in a config.json."""

CHATML = ("<|im_start|>", "<|im_end|>")
GEMMA = ("<start_of_turn>", "<end_of_turn>")
GEMMA4 = ("<|turn>", "<turn|>")
HARMONY = ("<|start|>", "<|end|>")
LLAMA3 = ("<|start_header_id|>", "<|eot_id|>")
LLAMA4 = ("<|header_start|>", "<|eot|>")
MISTRAL = ("[INST]", "[/INST]")
TURN_MARKERS = {
    "Gemma 3": GEMMA,
    "Gemma 4": GEMMA4,
    "Llama 3": LLAMA3,
    "Llama 4": LLAMA4,
    "Qwen 3": CHATML,
    "Mistral": MISTRAL,
}
"""The strings that begin and end a turn, by the models that are known for them."""


class UnsupportedCheckpoint(ValueError):
    """A config.json that asks for something that this family's model does not support.

    Attributes:
        key: the config key at fault, "" for no single key.
    """

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


@dataclass(frozen=True)
class Architecture:
    """The sizes that every family has; each family's own class adds its other sizes.

    `layer_types` holds the kind of attention of each layer. BY_LAYER names the fields that hold one value per
    layer. `vision` is the tower of a model that reads pictures: None in a checkpoint that has one, if only
    its language model is computed.
    """

    BY_LAYER: ClassVar[tuple[str, ...]] = ("layer_types",)

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    vision: VisionArchitecture | None = field(default=None, kw_only=True)

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def state(self) -> State | None:
        """Return what a layer carries from token to token; None if no layer does."""
        return None

    @property
    def stateful(self) -> bool:
        """Return whether a layer carries a state from token to token."""
        return LINEAR in self.layer_types or HYBRID in self.layer_types

    def scores(self, layer: int) -> bool:
        """Return whether a layer has attention by scores."""
        return self.layer_types[layer] not in (LINEAR, NONE)

    @property
    def routing(self) -> tuple[int, int]:
        """Return the experts of a layer, and how many of them a token goes through; zeros for none."""
        return 0, 0

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Return the layers with experts."""
        return tuple(range(self.num_layers)) if self.routing[0] else ()

    @property
    def balanced(self) -> bool:
        """Return whether transformers has a load-balancing loss for the experts."""
        return False

    def heads(self, layer: int) -> int:
        """Return the query heads of a layer."""
        return self.num_heads

    def kv_heads(self, layer: int) -> int:
        """Return the key/value heads of a layer."""
        return self.num_kv_heads

    def keys_as_values(self, layer: int) -> bool:
        """Return whether a layer's keys are also its values."""
        return False

    def window(self, layer: int) -> int | None:
        """Return the most tokens that a token of a layer sees, itself included; None for all earlier ones."""
        size: int | None = getattr(self, "sliding_window", None)
        return size if self.layer_types[layer] == SLIDING else None


@dataclass(frozen=True)
class Names:
    """The names of modules in transformers' model.

    Attributes:
        layers, embedding, norm: the list of layers, the token embedding and the final norm of the decoder.
        embeddings: further names under which checkpoints keep the token embedding.
        head: the output head, outside of the decoder.
        attention, delta, mamba, conv, mlp: a layer's modules. In a model with experts, ExpertTensors names
            the feed-forward block instead.
        qkv, out: in attention, the projection that makes queries, keys and values together, and the last one.
        qk_norms: in it, the norms of queries and of keys.
        gated: the projections of a feed-forward block: gate, up and down.
        plain: those of one without a gate.
        joined: those of one whose gate and up are one projection.
    """

    layers: str = "layers"
    embedding: str = "embed_tokens"
    embeddings: tuple[str, ...] = ()
    norm: str = "norm"
    head: str = "lm_head"
    attention: str = "self_attn"
    delta: str = "linear_attn"
    mamba: str = "mamba"
    conv: str = "conv"
    mlp: str = "mlp"
    qkv: str = "qkv_proj"
    out: str = "o_proj"
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")
    gated: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    plain: tuple[str, str] = ("c_fc", "c_proj")
    joined: tuple[str, str] = ("gate_up_proj", "down_proj")

    @property
    def of_embedding(self) -> tuple[str, ...]:
        """Return the names that the token embedding may have in a checkpoint, first the module's own."""
        return (self.embedding, *self.embeddings)


PREFIXES = ("model.language_model.", "language_model.model.", "model.", "gpt_neox.", "transformer.")
"""Prefixes of decoders' modules in transformers' models, current ones and those of 2025."""
LAYERS = r"(?:layers|h)"
"""Matches the names that `Names.layers` may be."""

EXPERTS = re.compile(r"\.experts\.(gate_up|down)$")
"""Matches the end of the paths of arrays that hold a layer's experts."""

EXPERT_INPUTS = (1,)
"""The axis of each array that EXPERTS matches that is summed with the input, by the last part of its path."""


@dataclass(frozen=True)
class Source:
    """One Hugging Face tensor, and how it becomes an array of the model, or a slice of one.

    The array is `tensor.reshape(reshape).transpose(transpose)`. `name` is without the
    checkpoint's prefix ("model.", "model.language_model.", ...); `whole` marks a tensor without a prefix
    ("lm_head.weight"). `outside` marks a tensor of a vision tower, whose name is complete.
    """

    name: str
    shape: tuple[int, ...]
    reshape: tuple[int, ...]
    transpose: tuple[int, ...]
    whole: bool = False
    outside: bool = False

    @property
    def module(self) -> str:
        """Return the module that has the tensor: "layers.0.input_layernorm"."""
        return self.name.rpartition(".")[0]

    def full_name(self, prefix: str) -> str:
        """Return the tensor's name in a checkpoint with this prefix."""
        if self.outside:
            return self.name
        if not self.whole:
            return prefix + self.name
        # Older multimodal checkpoints hold the whole language model, including its head, under one name.
        return self.name if not prefix.startswith("language_model.") else f"language_model.{self.name}"


@dataclass(frozen=True)
class Parameter:
    """One array of the model.

    Several sources are stacked along the axes of `stack`, the last axis varying fastest. A parameter without
    a source has no tensor in the checkpoint, and the model never reads it: it is filled with zeros. `buffer`
    marks what transformers holds as a buffer, and so never trains. `wide` marks a parameter that is float32
    in a model of any dtype. `frozen` marks what `train.trainable_modules` leaves out.
    """

    path: str
    shape: tuple[int, ...]
    spec: Spec
    sources: tuple[Source, ...]
    buffer: bool = False
    stack: tuple[int, ...] = (0,)
    wide: bool = False
    frozen: bool = False

    @property
    def stacked(self) -> tuple[int, ...]:
        """Return the axes that sources are stacked along; () if a single source has all axes of the array."""
        source_axes = len(self.sources[0].transpose) if self.sources else len(self.shape)
        return self.stack if source_axes < len(self.shape) else ()

    def place(self, number: int) -> tuple[int | slice, ...]:
        """Return the index of a source's part of the array."""
        out: list[int | slice] = [slice(None)] * len(self.shape)
        for axis in reversed(self.stacked):
            number, out[axis] = divmod(number, self.shape[axis])
        return tuple(out)

    @property
    def trainable(self) -> bool:
        """Return whether full fine-tuning trains the parameter."""
        return bool(self.sources) and not self.buffer and not self.frozen


@dataclass(frozen=True)
class LoraTarget:
    """A weight that can carry LoRA: the weight of a Hugging Face projection, or of all experts of a layer.

    Attributes:
        layer: index of the decoder layer; None for a weight of the vision tower or its projector.
        weight: the parameter's path.
        contract: the axes of the weight that are summed with the input.
        projection: the module's name in a layer of Hugging Face's model ("self_attn.k_proj"); without a layer
            its whole name ("visual.blocks.7.attn.qkv").
        experts: how many experts lie along the weight's first axis, each with its own A and B; 0 for none.
        alternate: whether gate and up alternate among Hugging Face's outputs, instead of following each
            other.
        swapped: whether PEFT's A multiplies an expert's outputs, and its B the inputs.
        words: a recipe's target must contain one of these words to match the weight, and the first word
            alone matches it; () if the projection's name is enough.
        parameter: the tensor's name in the layer of transformers' model, if PEFT lists it in
            `target_parameters`; "" for a linear layer.
        holder: the name of the list of layers in transformers' model.
        inner: the module within the projection that has the weight, at the end of the projection's name. A
            recipe's target may leave it out.
    """

    layer: int | None
    weight: str
    contract: tuple[int, ...]
    projection: str
    experts: int = 0
    alternate: bool = False
    swapped: bool = False
    words: tuple[str, ...] = ()
    parameter: str = ""
    holder: str = "layers"
    inner: str = ""

    @functools.cached_property
    def name(self) -> str:
        """Return the projection's name within the decoder: "layers.7.self_attn.k_proj". One of a vision tower
        has its name within the model: "vision_tower.encoder.layers.7.self_attn.k_proj"."""
        return self.projection if self.layer is None else f"{self.holder}.{self.layer}.{self.projection}"

    @property
    def of_tower(self) -> bool:
        """Return whether the weight is one of the vision tower or its projector."""
        return self.layer is None

    @property
    def stacked(self) -> int:
        """Return the number of expert axes before the axes of one expert's weight: 1 or 0."""
        return int(bool(self.experts))


class Family(ABC):
    """The knowledge of one model family; stateless."""

    name: str
    """The name of the family and of its module."""
    title: str
    """The family's name in messages: "Gemma 4"."""
    model_types: tuple[str, ...]
    """The `model_type` values of config.json that belong to this family; the last is the text model's. The
    name alone if a family gives none."""
    wrappers: tuple[str, ...] = ()
    """Model types of multimodal checkpoints whose `text_config` may be of this family."""
    prefixes: tuple[str, ...]
    """Prefixes of a checkpoint's text tensors, e.g. "model.language_model."; the checkpoint's own prefix is
    the one under which the token embedding is found. The last is that of a text model."""
    names: Names = Names()
    """The names of modules in transformers' model."""
    loaded_as: Mapping[str, str] = MappingProxyType({"language_model.model.": "model.language_model."})
    """Prefixes of older multimodal checkpoints, and of the modules that transformers 5 loads them into."""
    flash_attention: bool
    """Whether `splash` can compute this family's attention with the splash kernel."""
    quantized: tuple[str, ...] = ("fp8",)
    """Values of quantization_config's `quant_method` whose tensors are read as the numbers they represent."""
    turn_markers: tuple[str, ...] = ()
    """The strings that open and close a turn in the family's chat template; () if its models differ."""
    caps_in_float32: bool = True
    """Whether a soft-cap applies to the logits in float32, rather than in the product's dtype."""
    scaled_embedding: bool = False
    """Whether transformers' embedding itself multiplies by `embedding_scale`."""
    eager: bool = False
    """Whether transformers has only eager attention for it, because scores are soft-capped or have sinks."""
    chunk_in_torch: int = 0
    """The tokens up to which transformers' torch code computes the model right, unless config.json has a
    `chunk_size`: it carries the state from chunk to chunk wrongly. 0 for any number."""
    tunix: bool = True
    """Whether the backend tunix trains the model; otherwise only torchax does, by transformers' code."""

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls) and "model_types" not in vars(cls):
            cls.model_types = (cls.name,)

    @abstractmethod
    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """Read a config.json, with or without a nested `text_config`.

        Raises:
            UnsupportedCheckpoint: naming the key that the model does not support.
        """

    def architecture_of(
        self, config: Mapping[str, Any], tensors: Mapping[str, Sequence[int]]
    ) -> Architecture:
        """Read a checkpoint from its config.json and its tensors' names and shapes.

        Raises:
            UnsupportedCheckpoint: as `architecture`.
        """
        return self.architecture(config)

    def vision(self, config: Mapping[str, Any], tensors: Iterable[str] = ()) -> VisionArchitecture | None:
        """Read a checkpoint's vision tower and projector; None if it has none, or none that is computed here.

        Args:
            tensors: the names of the checkpoint's tensors, which differ between versions of transformers;
                empty if they are not known.

        Raises:
            UnsupportedCheckpoint: naming the key that is not supported.
        """
        return None

    def seeing(
        self, architecture: Architecture, config: Mapping[str, Any], tensors: Iterable[str] = ()
    ) -> Architecture | None:
        """Return the architecture with the checkpoint's vision tower, None without one that is computed here.

        The arguments are those of `vision`.
        """
        vision = self.vision(config, tensors)
        return None if vision is None else replace(architecture, vision=vision)

    def reads(self, quantization: Any) -> bool:
        """Return whether a checkpoint with this quantization_config (None for none) can be read."""
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else ""
        return quantization is None or method in self.quantized

    def miniature(self, config: Mapping[str, Any], small: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the keys of a miniature's config.json that miniature/small_checkpoint.py does not make.

        Args:
            config: the original's.
            small: the miniature's text config, as that module makes it.
        """
        return {}

    def kinds(self, config: Mapping[str, Any], layers: Sequence[int]) -> Mapping[str, Any]:
        """Return the keys of the text's config.json that name the kinds of its layers, for some layers."""
        types = self.architecture(config).layer_types
        return {"layer_types": [types[i] for i in layers]}

    def feed_forward(self, architecture: Architecture) -> str:
        """Return the name of the feed-forward block in a layer."""
        return self.names.mlp

    def kept(self, config: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of a miniature's tensors that no array is made from, by name without prefix."""
        return {}

    def further_layers(self, config: Mapping[str, Any]) -> int:
        """Return how many layers a checkpoint may hold after the model's own, to predict further tokens. They
        are neither trained nor changed."""
        return 0

    @abstractmethod
    def parameters(self, architecture: Architecture) -> list[Parameter]:
        """Return all arrays of the model, in layer order, with their default shardings."""

    @abstractmethod
    def lora_targets(self, architecture: Architecture) -> list[LoraTarget]:
        """Return all projections that can carry LoRA."""

    def expert_targets(self, architecture: Architecture) -> list[LoraTarget]:
        """Return the routers and experts that can carry LoRA, in layer order."""
        return []

    def all_targets(self, architecture: Architecture) -> list[LoraTarget]:
        """Return all weights that can carry LoRA, in layer order; those of the vision tower come last."""
        both = [*self.lora_targets(architecture), *self.expert_targets(architecture)]
        tower = () if architecture.vision is None else architecture.vision.targets()
        return [*sorted(both, key=lambda target: target.layer or 0), *tower]

    def norm_offset(self, architecture: Architecture) -> float:
        """Return what norms add to a checkpoint's weights: 1 if these hold the difference from 1."""
        return 0.0

    def markers(self, architecture: Architecture) -> tuple[str, ...]:
        """Return the strings that open and close a turn of one model; () if they are not known."""
        return self.turn_markers


@functools.lru_cache(maxsize=4)
def arrays(family: Family, architecture: Architecture) -> tuple[Parameter, ...]:
    """Return the family's `parameters`, of which a model with many experts has many, made once."""
    return tuple(family.parameters(architecture))


@functools.lru_cache(maxsize=4)
def sites(family: Family, architecture: Architecture) -> tuple[LoraTarget, ...]:
    """Return the family's `all_targets`, made once."""
    return tuple(family.all_targets(architecture))


@functools.lru_cache(maxsize=4)
def linear_layers(family: Family, architecture: Architecture) -> tuple[LoraTarget, ...]:
    """Return the family's `lora_targets`, made once."""
    return tuple(family.lora_targets(architecture))


def matrices(
    family: Family, architecture: Architecture, parameters: Sequence[Parameter]
) -> dict[str, tuple[int, ...]]:
    """Return the axes summed with the input, of all linear layers' and experts' weights, by path."""
    linear = {target.weight: target.contract for target in linear_layers(family, architecture)}
    paths = [parameter.path for parameter in parameters if EXPERTS.search(parameter.path)]
    return linear | dict.fromkeys(paths, EXPERT_INPUTS)


def parameter_path(keys: Sequence[Any]) -> str:
    """Make a parameter's dotted path from the key path of a pytree that mirrors the model."""
    parts = []
    for key in keys:
        part = getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))
        if part not in (None, "value"):
            parts.append(str(part))
    return ".".join(parts)


def tie_setting(config: Mapping[str, Any]) -> Any:
    """Return what a config.json says of `tie_word_embeddings`, None if it says nothing.

    transformers reads the key of the whole model first, and that of the text model only if the first is
    missing. LLaVA's models are tied if either says so.
    """
    whole, text = config.get(TIE), text_config(config).get(TIE)
    if str(config.get("model_type")).startswith("llava") and text is True:
        return text
    return text if whole is None else whole


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of config.json that describes the language model."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Read a positive integer of config.json that fits in 32 bits."""
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedCheckpoint(f"config.json: {key} is {value!r}, not a positive integer", key)
    if value > MOST:
        raise UnsupportedCheckpoint(f"config.json: {key} is above {MOST:,}", key)
    return value


def count(config: Mapping[str, Any], key: str) -> int:
    """Read a number of things in config.json, which may be zero; zero if the key is missing or null."""
    return 0 if config.get(key) in (None, 0) else integer(config, key)


def as_written(value: Any) -> Any:
    """Return the decimal that a float32 was written from: 1e-06 for the 9.999999974752427e-07 that
    conversions leave in a config.json. Return a value that is not exactly a float32 unchanged."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    try:
        if _float32(value) != value:
            return value
        return next(short for n in range(1, 10) if _float32(short := float(f"{value:.{n}g}")) == value)
    except OverflowError:
        return value


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def number(config: Mapping[str, Any], key: str, default: float) -> float:
    """Read a positive, finite number of config.json; null means the default."""
    value = config.get(key)
    value = default if value is None else as_written(value)
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if not known or not 0 < value <= sys.float_info.max:
        raise UnsupportedCheckpoint(f"config.json: {key} is {value!r}, not a positive number", key)
    return float(value)


def softcap(config: Mapping[str, Any], key: str, default: float | None) -> float | None:
    """Read a soft-cap of config.json: null means none, a missing key means transformers' default."""
    value = config.get(key, default)
    return None if value is None else number({key: value}, key, 1.0)


def built_in(config: Mapping[str, Any], key: str, value: object, model: str) -> None:
    """Refuse a config.json that asks for another value than the one built into the model."""
    written = as_written(config.get(key))
    if written is not None and written != value:
        raise UnsupportedCheckpoint(
            f"config.json: {key} is {written!r}; {model} supports only {value!r}", key
        )


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a nested object of config.json, empty if it is missing or null."""
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise UnsupportedCheckpoint(f"config.json: {key} is {value!r}, not an object", key)
    return value


def listed_types(types: Any, layers: int, known: Sequence[str] = (FULL, SLIDING)) -> tuple[str, ...]:
    """Read `layer_types` of a config.json.

    Raises:
        UnsupportedCheckpoint: unless it names a known kind for each layer.
    """
    listed = isinstance(types, list | tuple) and len(types) == layers
    if not listed or not all(kind in known for kind in types):
        kinds = " or ".join(kind.removesuffix("_attention") for kind in known)
        raise UnsupportedCheckpoint(
            f"config.json: layer_types does not name {layers} {kinds} layers", "layer_types"
        )
    return tuple(types)


def output_projection(name: str, heads: int, head_dim: int, hidden: int) -> Source:
    """Describe an attention output weight: [hidden, heads * head_dim] becomes [heads, head_dim, hidden]."""
    return Source(name, (hidden, heads * head_dim), (hidden, heads, head_dim), (1, 2, 0))


def linear(name: str, features_in: int, features_out: int, whole: bool = False) -> Source:
    """Describe a dense weight: [out, in] becomes [in, out]."""
    shape = (features_out, features_in)
    return Source(name, shape, shape, (1, 0), whole)


def plain(name: str, shape: Sequence[int]) -> Source:
    """Describe a tensor that is used unchanged."""
    shape = tuple(shape)
    return Source(name, shape, shape, tuple(range(len(shape))))


def dense(path: str, name: str, shape: tuple[int, int], spec: Spec) -> Parameter:
    """Return a weight [in, out] that is one linear layer's."""
    return Parameter(path, shape, spec, (linear(f"{name}.weight", *shape),))
