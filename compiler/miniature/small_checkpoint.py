"""Miniature checkpoints: a model's family, layer pattern and key/value layout at a very small size.

A miniature has random weights, wide enough that its logits are far from flat. Its layout is the original's:
several safetensors files with an index, the multimodal tensors next to the text model's, tokenizer and chat
template. It is written without torch. numpy, safetensors and tokenizers are imported only where they are
used.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from recipec.compiler.catalog import Tokens, class_name, facts_of, with_pictures
from recipec.compiler.miniature.fewer_layers import pattern, with_layers
from recipec.compiler.miniature.small_towers import TOWERS, tower_kind, tower_of
from recipec.runtime.model.families import Architecture, family_of
from recipec.runtime.model.families.family import CHUNKED, SLIDING, text_config
from recipec.runtime.model.partition_rules import shards

if TYPE_CHECKING:
    import numpy as np


def write_checkpoint(
    directory: Path,
    config: Mapping[str, Any],
    texts: Sequence[str] = (),
    shards: int = 2,
    dtype: str = "bfloat16",
    embedding_scale: float = 0.5,
    added: Mapping[str, str | None] = MappingProxyType({}),
) -> None:
    """Write config.json, the weights with their index, generation_config.json and the tokenizer.

    The write is atomic: the directory is either complete or absent. An existing directory is replaced. A
    tensor's values depend only on its name and shape, so that they are the same in every split.

    Args:
        config: as returned by `shrink` or `complete`.
        texts: texts from which to learn the tokenizer's merges; a few English sentences if empty.
        shards: number of safetensors files.
        dtype: type of the weights, "bfloat16" or "float32".
        embedding_scale: standard deviation of the token embeddings, which sets how far the logits are
            from flat: about 8 times this at hidden size 64.
        added: as in `write_tokenizer`.
    """
    from recipec.runtime.model.random_weights import is_table, random_tensor

    family = family_of(config)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    offset = family.norm_offset(family.architecture(config))
    names = family.names
    tensors = {name: random_tensor(name, shape, offset, 0, names) for name, shape in _tensors(config)}
    for name in tensors:
        if is_table(name, names):
            tensors[name] *= embedding_scale
    _write_shards(partial, {name: _cast(tensor, dtype) for name, tensor in tensors.items()}, shards)
    _write_json(partial / "config.json", dict(config) | {"dtype": dtype})
    _write_json(
        partial / "generation_config.json",
        {"bos_token_id": 2, "eos_token_id": [1, tokens_of(config).turn_end], "pad_token_id": 0},
    )
    if (tower := tower_of(config)) is not None:
        for name, value in tower.files.items():
            _write_json(partial / name, value)
    write_tokenizer(partial, tokens_of(config), texts, added)
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)


def _tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield every tensor of the checkpoint with its shape: text in layer order, then the vision tower."""
    family = family_of(config)
    tower = tower_of(config)
    prefix = family.prefixes[-1] if tower is None else tower.text
    for parameter in family.parameters(family.architecture(config)):
        for source in parameter.sources:
            yield source.full_name(prefix), source.shape
    for name, shape in family.kept(text_config(config)).items():
        yield prefix + name, shape
    if tower is not None:
        # A checkpoint also has the last layers of a tower, of which LLaVA makes no feature.
        whole = {**config, "vision_feature_layer": -1}
        vision = family.vision(whole, tower.held)
        assert vision is not None
        yield from tower.unread.items()
        for parameter in vision.parameters():
            for source in parameter.sources:
                yield source.name, source.shape


def _cast(values: np.ndarray, dtype: str) -> np.ndarray:
    import ml_dtypes
    import numpy as np

    return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)


def _write_shards(directory: Path, tensors: Mapping[str, np.ndarray], shards: int) -> None:
    """Split the tensors, in order, into files of about the same size, and write their index."""
    from safetensors.numpy import save_file

    total = sum(tensor.nbytes for tensor in tensors.values())
    groups: list[dict[str, np.ndarray]] = [{} for _ in range(shards)]
    done = 0
    for name, tensor in tensors.items():
        groups[min(shards - 1, done * shards // total)][name] = tensor
        done += tensor.nbytes
    weight_map: dict[str, str] = {}
    for i, group in enumerate(groups, start=1):
        file = f"model-{i:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        save_file(group, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(group, file)
    if shards > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(directory / "model.safetensors.index.json", index)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def tokens_of(config: Mapping[str, Any]) -> Tokens:
    """Return the tokenizer of a miniature, from its config.json."""
    tokens, tower = facts_of(family_of(config).name).tokens, tower_of(config)
    if tower is None or not tower.special:
        return tokens
    special = (*tokens.special, *tower.special)
    return replace(
        tokens,
        special=special,
        chat_template=with_pictures(tokens.chat_template, tower.place),
        media={key: special.index(token) for key, token in tower.media.items()},
    )


ROLES = ("system", "user", "model", "assistant")

SAMPLE = (
    "A recipe says how a model is trained, and the compiler writes what trains it.",
    "The quick brown fox jumps over the lazy dog while five boxing wizards watch from the hill.",
    "What is the capital of France? The capital of France is Paris, which lies on the river Seine.",
    "Add two and three, then multiply by seven: the answer is thirty-five, as anyone can check.",
    "Write a short poem about rain. Rain falls on the roof and sings, and the garden drinks it all.",
    "Merge the adapters into their base, shard by shard, and keep every other tensor as it was.",
    "Weights without training say nothing useful, though they multiply quite as fast as any others.",
    "Each morning a baker kneads the dough, waits an hour, shapes twelve loaves, and lights her oven.",
)


def write_tokenizer(
    directory: Path,
    kind: str | Tokens,
    texts: Sequence[str] = (),
    added: Mapping[str, str | None] = MappingProxyType({}),
) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja in transformers' format.

    Args:
        directory: an existing directory.
        kind: the special tokens and the template; or the name of a family, for its own.
        texts: texts from which to learn the merges; SAMPLE if empty.
        added: model.add_tokens, for which it has the tokens that are replaced, and room for the others.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokens = facts_of(kind).tokens if isinstance(kind, str) else kind
    pad, eos, bos, unknown = tokens.special[:4]
    tokenizer = Tokenizer(models.BPE(unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - list(added.values()).count(None),
        min_frequency=1,
        special_tokens=[*dict.fromkeys((*tokens.special, *filter(None, added.values())))],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Every sample includes the role names, so that even a few texts are enough to learn them.
    tokenizer.train_from_iterator([*(texts or SAMPLE), *(f"{role}\n" for role in ROLES)], trainer)
    if tokens.begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, 2)]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos if tokens.begins else None,
        "eos_token": eos,
        "pad_token": pad,
        "unk_token": unknown,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        **tokens.named,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(tokens.chat_template, encoding="utf-8")


VOCABULARY = 512
"""Tokens of the tokenizer, and the smallest vocabulary of the model."""

HIDDEN = 64
"""The smallest hidden size."""

WINDOW = 16
"""Tokens that a local layer sees: fewer than the length of the rehearsed sequences."""
SEEN = {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}
"""The keys that set this number, by layer kind."""

CONTEXT = 64
"""Tokens of the original context, if the model's context was extended."""

LONGEST = 4096
"""Tokens of the longest context."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "experts_per_token", "top_k_experts")

STATES = (
    ("linear_num_key_heads", "linear_num_value_heads"),
    ("mamba_n_heads", "mamba_n_groups"),
    ("mamba_num_heads", "n_groups"),
)
"""Keys for the numbers of heads, or of heads and groups, of a layer with a state."""

NOT_TAKEN = (
    *("torch_dtype", "transformers_version", "_name_or_path", "auto_map", "architectures"),
    "quantization_config",  # a miniature is written in the type that it is trained in
)


def shrink(
    config: Mapping[str, Any],
    axes: Mapping[str, int] | None = None,
    head_dim: int = 16,
    multimodal: Mapping[str, Any] = MappingProxyType({}),
    positions: int = 0,
) -> dict[str, Any]:
    """Return a config.json of the same family, with one full period of layers and at least two layers.

    These ratios are kept: query to key/value heads, sizes of the heads, and frequencies to the context they
    were made for. If the heads together are as wide as the hidden size, they stay so. Every size that a mesh
    axis splits is a multiple of that axis. Values that are not sizes do not change.

    Args:
        config: the original's. That of a multimodal model becomes nested if its tower has an entry in TOWERS.
        axes: axes of the mesh that the miniature is trained on.
        head_dim: the least size of a head.
        multimodal: keys of the original's that describe its tower, if `config` lacks them. LLaVA has several.
        positions: the least length of the longest context, in tokens.
    """
    family, text = family_of(config), text_config(config)
    sizes = Sizes.of(family.architecture(config), text, axes or {}, head_dim)
    layers = pattern(config)
    layers = layers if len(layers) > 1 else 2 * layers
    if shared := bool(text.get("num_kv_shared_layers")):
        layers *= 2  # the second period reads keys and values that the first one keeps
    small = resized(with_layers(config, layers), text, sizes)
    small["max_position_embeddings"] = max(small["max_position_embeddings"], positions)
    if shared:
        small["num_kv_shared_layers"] = len(layers) // 2
    for kind, key in SEEN.items():
        if key not in small and kind in sizes.original.layer_types:
            small[key] = WINDOW
    small |= family.miniature(config, small)
    kind = tower_kind({**config, **multimodal})
    if kind not in TOWERS:
        return complete(small)
    if text is config:  # published as one level
        small["model_type"] = f"{kind}_text"
    return complete({"model_type": config["model_type"], "text_config": small}, kind)


@dataclass(frozen=True)
class Sizes:
    """The sizes from which all other sizes of a miniature follow.

    Attributes:
        original: the architecture of the original.
        step: every size that may be split is a multiple of it.
        tp: number of devices that the heads are split over.
        hidden: hidden size.
        head_dim: size of each head.
        heads, kv_heads, global_kv_heads: counts; the last is for Gemma 4's global layers, else None.
    """

    original: Architecture
    step: int
    tp: int
    hidden: int
    head_dim: int
    heads: int
    kv_heads: int
    global_kv_heads: int | None

    @classmethod
    def of(
        cls, original: Architecture, text: Mapping[str, Any], axes: Mapping[str, int], head_dim: int = 16
    ) -> Sizes:
        step, tp = math.lcm(8, shards("fsdp", axes), *axes.values()), axes.get("tp", 1)
        head_dim = _multiple(head_dim, step)
        fits = original.hidden_size == original.num_heads * original.head_dim
        global_kv_heads = text.get("num_global_key_value_heads")
        counts = [original.num_heads, original.num_kv_heads, *([global_kv_heads] if global_kv_heads else [])]
        heads, kv_heads, *rest = _heads(counts, tp, least=-(-HIDDEN // head_dim) if fits else 2)
        hidden = heads * head_dim if fits else _multiple(HIDDEN, math.lcm(step, heads))
        return cls(original, step, tp, hidden, head_dim, heads, kv_heads, rest[0] if rest else None)

    def scaled(self, size: float) -> float:
        """Scale a number that is proportional to the size of a head."""
        return size * self.head_dim / self.original.head_dim


def resized(values: Mapping[str, Any], text: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Return a text model's config values at a miniature's sizes, without keys that do not apply to it.

    Args:
        values: the config, already cut to the layers that are kept.
        text: the original's text config.
    """
    small = {key: value for key, value in values.items() if not _is_dropped(key)}
    scaled: dict[str, Any] = _scaled(small, sizes)
    return scaled | _sized(text, sizes)


def _sized(text: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Return the values of keys that are sizes: keys that every model has, and those set in this config."""
    s, hidden = sizes, sizes.hidden
    vocabulary = _multiple(VOCABULARY, s.step)
    out: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * _multiple(HIDDEN, s.step),
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "max_position_embeddings": _positions(text),
        **{"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
    }
    if "head_dim" in text or s.original.hidden_size != s.original.num_heads * s.original.head_dim:
        out["head_dim"] = s.head_dim
    reduced: dict[str, Any] = {
        **dict.fromkeys(SEEN.values(), WINDOW),
        "floor_scale": WINDOW,
        "num_global_key_value_heads": s.global_kv_heads,
        "global_head_dim": s.head_dim * max(1, (text.get("global_head_dim") or 0) // s.original.head_dim),
        "hidden_size_per_layer_input": s.head_dim,
        "vocab_size_per_layer_input": vocabulary,
        "intermediate_size_mlp": 2 * _multiple(HIDDEN, s.step),
        "moe_intermediate_size": hidden,
        **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), hidden),
        "moe_shared_expert_intermediate_size": hidden,
        "moe_latent_size": s.head_dim,
        "linear_key_head_dim": s.head_dim,
        "linear_value_head_dim": s.head_dim,
        **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_d_state", "ssm_state_size"), s.head_dim),
        "mamba_dt_rank": s.head_dim,
    }
    reduced |= {key: min(s.step, text.get(key) or 0) for key in EXPERTS}
    reduced |= {key: min(2, text.get(key) or 0) for key in EXPERTS_PER_TOKEN}
    for keys in STATES:
        reduced |= dict(zip(keys, _heads([text.get(key) or 1 for key in keys], s.tp, 2), strict=True))
    reduced["mamba_d_ssm"] = reduced["mamba_n_heads"] * s.head_dim
    return out | {key: value for key, value in reduced.items() if text.get(key)}


def _scaled(value: Any, sizes: Sizes, key: str = "") -> Any:
    """Return a config's values, with those replaced that depend on the size of a head or on the context that
    the model was made for. Replaces them in nested objects as well."""
    if isinstance(value, Mapping):
        return {name: _scaled(inner, sizes, name) for name, inner in value.items()}
    if key == "original_max_position_embeddings" and value:
        # Short enough that rehearsed positions exceed it.
        return CONTEXT
    if key in ("short_factor", "long_factor") and isinstance(value, list):  # one for each pair of features
        count = max(1, round(sizes.scaled(len(value))))
        return [value[i * len(value) // count] for i in range(count)]
    if key == "mrope_section" and isinstance(value, list):  # pairs of features for each kind of position
        rest = [round(sizes.scaled(count)) for count in value[1:]]
        return [round(sizes.scaled(sum(value))) - sum(rest), *rest]
    if key == "query_pre_attn_scalar" and value:  # scores are divided by its root
        return round(sizes.scaled(value))
    if key == "attention_multiplier" and value:  # scores are multiplied by it
        return value / sizes.scaled(1)
    # Divisors and factors made for logits of thousands of features would flatten those of a few features.
    if key == "logits_scaling" and value:
        return min(value, 4.0)
    if key in ("logit_scale", "lm_head_multiplier") and value:
        return max(value, 0.25)
    return value


def _positions(text: Mapping[str, Any]) -> int:
    """Return the longest context, in the original's ratio to its context before extension. Without that
    value, CONTEXT for kinds of rotary scaling that use the longest context instead, otherwise LONGEST."""
    places = [text, *(value for value in text.values() if isinstance(value, Mapping))]
    before = next((n for place in places if (n := place.get("original_max_position_embeddings"))), None)
    most = text.get("max_position_embeddings")
    if before:
        return round(CONTEXT * most / before) if most else LONGEST
    kinds = {place.get("rope_type", place.get("type")) for place in places}
    return LONGEST if kinds <= {None, "default", "linear", "proportional"} else CONTEXT


def _is_dropped(key: str) -> bool:
    """Return whether a key does not apply to a miniature: about the tokenizer, code, or how it was saved."""
    return key in NOT_TAKEN or key.endswith(("_token_id", "_token_ids", "_token_index"))


def complete(config: Mapping[str, Any], kind: str | None = None) -> dict[str, Any]:
    """Complete a text config, or one nested in `text_config`, with the other keys that transformers requires.

    A nested config becomes the multimodal model, with a small vision tower.

    Args:
        kind: of the tower, a key of TOWERS; None for the one of the model's type.
    """
    text = dict(text_config(config))
    if "text_config" not in config:
        return {**text, "architectures": [f"{class_name(text)}ForCausalLM"], "dtype": "bfloat16"}
    whole_type = str(config["model_type"])
    tower = TOWERS[kind or whole_type]
    hidden = text["hidden_size"]
    vision = {key: hidden if value is None else value for key, value in tower.config.items()}
    whole = {
        "architectures": [CONDITIONAL.get(whole_type, f"{class_name(text)}ForConditionalGeneration")],
        "model_type": whole_type,
        "dtype": "bfloat16",
        "tie_word_embeddings": text.get("tie_word_embeddings", True),
        "text_config": text,
        "vision_config": vision,
        **tower.further,
    }
    return whole | dict(tokens_of(whole).media)


CONDITIONAL = {
    "llava": "LlavaForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
}
"""transformers' classes of multimodal models that hold a text model of another name, by model type."""


def _heads(counts: Sequence[int], tp: int, least: int) -> list[int]:
    """Return the smallest counts with the same ratios, the first at least `least`. Counts that tp divides in
    the original are divisible by tp here too."""
    unit = math.gcd(*counts)
    small = [count // unit for count in counts]
    factor = math.lcm(
        *(tp // math.gcd(tp, s) for s, count in zip(small, counts, strict=True) if count % tp == 0)
    )
    factor *= -(-least // (factor * small[0]))
    return [s * factor for s in small]


def _multiple(least: int, of: int) -> int:
    return -(-least // of) * of
