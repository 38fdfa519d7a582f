"""Any other causal model of transformers, computed by transformers itself, only in the TorchAX backend.

Only the checkpoint describes such a model: config.json, and the names and shapes of its tensors. Its
parameters are these tensors under their own names, [out, in]. RULES tell how they are split over a mesh. LoRA
can be applied to each weight that is a linear layer by its name and shape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .family import (
    FULL,
    SLIDING,
    TIE,
    Architecture,
    Family,
    LoraTarget,
    Parameter,
    Source,
    Spec,
    UnsupportedCheckpoint,
    integer,
    plain,
)

PREFIX = "model."
"""Prefix of the decoder's tensors."""
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
LAYER = re.compile(r"layers\.(\d{1,4})\.(.+)")
RECURRENT = re.compile(r"(conv1d|A_log|dt_bias|time_mix|linear_attn|ssm|mamba|recurrent|short_conv)\b")
"""Names of tensors that show layers with a state carried from token to token."""
ATTENTION = re.compile(r"\b(self_attn|attn|attention)\.")
NO_LINEAR = re.compile(r"norm|conv|embed|router|expert|(^|\.)gate$|bias|scale", re.IGNORECASE)
"""Two-dimensional weights of modules that are not linear layers, by the module's name within the layer."""
LAYERS_APART = re.compile(r"interval|period|offset|pattern|layer_ind|_layers_|first_k|max_window_layers")
"""Parts of config.json keys that distinguish layers by number."""
IGNORED = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache")
"""Keys of config.json that do not describe the model."""

COLUMNS: Spec = ("tp", "fsdp")
ROWS: Spec = ("fsdp", "tp")
RULES: tuple[tuple[str, Spec], ...] = (
    (r"embed_tokens\.weight|lm_head\.weight", COLUMNS),
    (r".*\.(o_proj|out_proj|down_proj|dense|fc2|w2|c_proj|dense_4h_to_h)\.weight", ROWS),
    (
        r".*\.(q_proj|k_proj|v_proj|qkv_proj|gate_proj|up_proj|gate_up_proj|in_proj|fc1|w1|w3|c_fc|"
        r"query_key_value|dense_h_to_4h)\.weight",
        COLUMNS,
    ),
)
"""How a matrix is split, by its name without the checkpoint's prefix: the first expression that matches the
whole name applies. Any other matrix is split over fsdp in its first dimension. Vectors and arrays with more
dimensions are not split, nor is a dimension that its axis does not divide."""


@dataclass(frozen=True)
class TransformersArchitecture(Architecture):
    """A checkpoint's config and tensors.

    Attributes:
        model_type: config.json's.
        config: config.json as JSON, without the keys that do not describe the model.
        tensors: names, with {} for a layer's number, with shape and layers: "0-3,5", "" for none.
        tied: whether the embedding serves as output head.
        experts: of a layer, 0 for none.
    """

    model_type: str
    config: str
    tensors: tuple[tuple[str, tuple[int, ...], str], ...]
    tied: bool
    experts: int

    def each(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield every tensor by its name without the checkpoint's prefix, with its shape."""
        for name, shape, layers in self.tensors:
            for layer in _numbers(layers):
                yield name.replace("{}", str(layer)), shape
            if not layers:
                yield name, shape

    @property
    def recurrent(self) -> bool:
        """Return whether the tensors show layers that carry a state from token to token."""
        return any(RECURRENT.search(name) for name, _, _ in self.tensors)

    @property
    def values(self) -> dict[str, Any]:
        """Return config.json's values."""
        config: dict[str, Any] = json.loads(self.config)
        return config

    @property
    def uniform(self) -> bool:
        """Return whether all layers are of one kind, as far as tensors and config.json tell."""
        whole = _spelled(range(self.num_layers))
        lists = [value for value in self.values.values() if isinstance(value, list)]
        several = any(len(value) == self.num_layers and len({*map(str, value)}) > 1 for value in lists)
        named = any(LAYERS_APART.search(key) for key, value in self.values.items() if value)
        return not (several or named) and all(layers in ("", whole) for _, _, layers in self.tensors)

    def shortened(self, layers: Sequence[int]) -> TransformersArchitecture:
        """Return a uniform architecture with some of its layers, which are renumbered."""
        if len(layers) == self.num_layers:
            return self
        kept = _spelled(range(len(layers)))
        values = {
            key: value[: len(layers)] if isinstance(value, list) and len(value) == self.num_layers else value
            for key, value in self.values.items()
        }
        return replace(
            self,
            layer_types=tuple(self.layer_types[i] for i in layers),
            config=json.dumps(values | {"num_hidden_layers": len(layers)}, sort_keys=True),
            tensors=tuple((name, shape, kept if numbers else "") for name, shape, numbers in self.tensors),
        )

    @property
    def dropout(self) -> tuple[tuple[str, float], ...]:
        """Return dropout that config.json asks for during training, by key; it is not applied."""
        named = ((key, value) for key, value in sorted(self.values.items()) if "drop" in key)
        return tuple((key, float(value)) for key, value in named if isinstance(value, float) and value > 0)


class Transformers(Family):
    """Any causal model of transformers that no other family describes."""

    name = "transformers"
    title = "a model of transformers"
    model_types = ()
    prefixes = (PREFIX,)
    flash_attention = False
    quantized = ()
    tunix = False

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        raise unlike(config, "the names and shapes of its tensors are not known", "model_type")

    def architecture_of(
        self, config: Mapping[str, Any], tensors: Mapping[str, Sequence[int]]
    ) -> TransformersArchitecture:
        refuse(config)
        embedding, names = tuple(tensors.get(PREFIX + EMBEDDING, ())), [*map(_bare, tensors)]
        if len(embedding) != 2 or not any(map(LAYER.match, names)):
            raise unlike(
                config, f"its tensors are not named {PREFIX}{EMBEDDING} and {PREFIX}layers.0", "model_type"
            )
        tied = HEAD not in tensors or config.get(TIE) is True
        tensors = {name: shape for name, shape in tensors.items() if name != HEAD or not tied}
        layers, hidden = integer(config, "num_hidden_layers"), integer(config, "hidden_size")
        heads = integer(config, "num_attention_heads", 1)
        values = {key: value for key, value in config.items() if value}
        grouped = _grouped(config, tensors)
        numbers = sorted({layer for _, _, spelled in grouped for layer in _numbers(spelled)})
        if numbers != list(range(layers)):
            why = f"num_hidden_layers is {layers}, and there are tensors of layers {_spelled(numbers)}"
            raise UnsupportedCheckpoint(f"config.json: {why}", "num_hidden_layers")
        if embedding[1] != hidden:
            why = f"hidden_size is {hidden}, and {PREFIX}{EMBEDDING} is {list(embedding)}"
            raise UnsupportedCheckpoint(f"config.json: {why}", "hidden_size")
        if not any(ATTENTION.search(name) for name, _, _ in grouped):
            raise unlike(config, "it has no attention; recurrent layers alone are not trained", "model_type")
        kinds = config.get("layer_types")
        if not isinstance(kinds, list) or len(kinds) != layers:
            kinds = [FULL] * layers
        return TransformersArchitecture(
            family=self.name,
            vocab_size=embedding[0],
            hidden_size=hidden,
            intermediate_size=integer(config, "intermediate_size", hidden),
            num_heads=heads,
            num_kv_heads=integer(values, "num_key_value_heads", heads),
            head_dim=integer(values, "head_dim", max(1, hidden // heads)),
            layer_types=tuple(SLIDING if kind == SLIDING else FULL for kind in kinds),
            model_type=str(config.get("model_type")),
            config=json.dumps(
                {key: value for key, value in config.items() if key not in IGNORED}, sort_keys=True
            ),
            tensors=grouped,
            tied=tied,
            experts=_experts(config, grouped),
        )

    def parameters(self, architecture: Architecture) -> list[Parameter]:
        assert isinstance(architecture, TransformersArchitecture)
        return [_parameter(name, shape) for name, shape in architecture.each()]

    def lora_targets(self, architecture: Architecture) -> list[LoraTarget]:
        assert isinstance(architecture, TransformersArchitecture)
        out = []
        for name, shape in architecture.each():
            match = LAYER.fullmatch(name)
            if match is None or len(shape) != 2 or not is_linear(match[2]):
                continue
            out.append(LoraTarget(int(match[1]), name, (1,), match[2].removesuffix(".weight")))
        return sorted(out, key=lambda target: target.layer or 0)


def refuse(config: Mapping[str, Any]) -> None:
    """Refuse models that are not a causal language model of one text decoder.

    Raises:
        UnsupportedCheckpoint: naming what the model is.
    """
    names = config.get("architectures")
    named = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if config.get("is_encoder_decoder"):
        raise unlike(config, "it is an encoder-decoder", "model_type")
    if "_diffusers_version" in config or "Diffusion" in named:
        raise unlike(config, "it is a diffusion model", "model_type")
    if config.get("quantization_config") is not None:
        raise UnsupportedCheckpoint(
            "config.json: quantization_config says that the weights are stored quantized; train the original "
            "checkpoint",
            "quantization_config",
        )
    if named and not named.endswith(("ForCausalLM", "LMHeadModel")):
        raise unlike(config, f"{named} is not a causal language model", "model_type")


def unlike(config: Mapping[str, Any], why: str, key: str = "") -> UnsupportedCheckpoint:
    """Make the error for a model that cannot be taken."""
    kind = config.get("model_type")
    return UnsupportedCheckpoint(
        f"config.json: model_type is {kind!r}, which no family describes: {why}", key
    )


def is_linear(name: str) -> bool:
    """Return whether a matrix is a linear layer's weight, by its name ("self_attn.q_proj.weight")."""
    module, _, kind = name.rpartition(".")
    return kind == "weight" and NO_LINEAR.search(module) is None


def default_spec(name: str, shape: Sequence[int]) -> Spec:
    """Return the sharding of a tensor by RULES, by its name without the checkpoint's prefix."""
    if len(shape) != 2:
        return (None,) * len(shape)
    return next((spec for rule, spec in RULES if re.fullmatch(rule, name)), ("fsdp", None))


def _parameter(name: str, shape: tuple[int, ...]) -> Parameter:
    whole = plain(name, shape)
    if not _of_decoder(name):
        whole = Source(name, shape, shape, whole.transpose, whole=True)
    return Parameter(name, shape, default_spec(name, shape), (whole,))


def _of_decoder(name: str) -> bool:
    return name != HEAD and not name.startswith("lm_head.")


def _bare(name: str) -> str:
    return name.removeprefix(PREFIX)


def _grouped(
    config: Mapping[str, Any], tensors: Mapping[str, Sequence[int]]
) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Group tensors of the same name and shape, in the order of their names."""
    groups: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for name, shape in tensors.items():
        if not name.startswith((PREFIX, "lm_head.")):
            raise unlike(config, f"{name} is a tensor neither of its decoder, {PREFIX}..., nor of lm_head")
        match = LAYER.fullmatch(_bare(name))
        key = f"layers.{{}}.{match[2]}" if match else _bare(name)
        groups.setdefault((key, tuple(shape)), []).extend([int(match[1])] if match else [])
    return tuple((name, shape, _spelled(sorted(layers))) for (name, shape), layers in sorted(groups.items()))


def _spelled(numbers: Sequence[int]) -> str:
    """Spell ascending numbers as ranges: "0-3,5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _numbers(spelled: str) -> Iterator[int]:
    for part in spelled.split(",") if spelled else ():
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _experts(config: Mapping[str, Any], tensors: Sequence[tuple[str, tuple[int, ...], str]]) -> int:
    """Return the number of experts of a layer; the tensors' names tell whether there are any."""
    if not any("experts." in name for name, _, _ in tensors):
        return 0
    keys = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next((config[key] for key in keys if isinstance(config.get(key), int)), 2)
