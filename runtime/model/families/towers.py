"""Vision towers and projectors, read from config.json: one function for each kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from .description import ACTIVATIONS, AROUND, DecoderArchitecture, Norm, Places
from .family import (
    FULL,
    SLIDING,
    UnsupportedCheckpoint,
    built_in,
    count,
    integer,
    number,
    section,
    text_config,
)
from .vision import (
    Activate,
    ClassToken,
    DropClassToken,
    LayerNames,
    Linear,
    Mean,
    Merge,
    Normalize,
    PixelShuffle,
    Positions,
    Rescale,
    Step,
    TileMean,
    Turning,
    VisionArchitecture,
    VisionLayers,
    prefixes_of,
)

CLIP = "clip_vision_model"
VISION = "vision_config"
"""The key of config.json that describes the tower."""

HELD = {
    "vision_tower": ("model.vision_tower.", "vision_tower.vision_model.", "vision_tower."),
    "multi_modal_projector": ("model.multi_modal_projector.", "multi_modal_projector."),
    "embed_vision": ("model.embed_vision.",),
    "vision_embedder": ("model.vision_embedder.",),
    "visual": ("model.visual.", "visual."),
    "projector": ("model.projector.", "mlp_AR."),
    "vision_model": ("vision_model.",),
}
"""What the tensors of a part begin with, by its name in transformers' model. The published form is last."""


HOLDER = "model."
"""What most of transformers' models put before the names of these parts."""

TEXT_IN_WHOLE = f"{HOLDER}language_model."
"""What they put before the names of the text model's modules."""


def holder(config: Mapping[str, Any]) -> str:
    """Return what transformers' model puts before the names of these parts."""
    return "" if config.get("model_type") == "llama4" else HOLDER


def in_transformers(config: Mapping[str, Any], name: str) -> str | None:
    """Return the name in transformers' model of a tensor of these parts, None for another tensor."""
    for part, starts in HELD.items():
        for start in starts:
            if name.startswith(start):
                return f"{holder(config)}{part}.{name.removeprefix(start)}"
    return None


def is_of_tower(module: str) -> bool:
    """Return whether a module, named within the model, is of a tower or its projector."""
    return module.partition(".")[0] in HELD


def vision_of(
    config: Mapping[str, Any], text: DecoderArchitecture, tensors: Iterable[str] = ()
) -> VisionArchitecture | None:
    """Read a checkpoint's tower and projector; None if it has none, or none that is computed here.

    Args:
        text: the description of its language model.
        tensors: the names of the checkpoint's tensors; empty if they are not known.

    Raises:
        UnsupportedCheckpoint: naming the key that is not supported.
    """
    vision, kind = section(config, VISION), kind_of(config)
    if not vision or kind not in READERS:
        return None
    _, reader = READERS[kind]
    return replace(reader(config, vision, text, prefixes_of(tensors, HELD)), holder=holder(config))


def kind_of(config: Mapping[str, Any]) -> str:
    """Return the model type whose tower a checkpoint has, "" for one of LLaVA that is not here."""
    kind = str(config.get("model_type"))
    if kind != "llava":
        return kind
    return {"pixtral": "mistral3", CLIP: kind}.get(str(section(config, VISION).get("model_type")), "")


Prefixes = tuple[tuple[str, str], ...]


def _gemma3(
    config: Mapping[str, Any], vision: Mapping[str, Any], text: DecoderArchitecture, prefixes: Prefixes
) -> VisionArchitecture:
    """SigLIP (https://arxiv.org/abs/2303.15343), whose features are averaged over squares."""
    _is(vision, "siglip_vision_model")
    d, heads, head_dim = _heads(vision, 768, 12)
    patch, channels = integer(vision, "patch_size", 16), integer(vision, "num_channels", 3)
    tokens, side = integer(config, "mm_tokens_per_image", 256), integer(vision, "image_size", 224) // patch
    pooled = math.isqrt(tokens)
    if pooled**2 != tokens or side % pooled:
        raise UnsupportedCheckpoint(
            f"config.json: mm_tokens_per_image is {tokens}, and a picture has {side} x {side} patches, which "
            "do not average to a square of so many",
            "mm_tokens_per_image",
        )
    norm = _layer_norm(number(vision, "layer_norm_eps", 1e-6))
    tower, projector = "vision_tower", "multi_modal_projector"
    features = channels * patch**2
    return VisionArchitecture(
        kind="SigLIP",
        prefixes=prefixes,
        patch_features=features,
        text_size=text.hidden_size,
        embedder=(
            Linear(
                "patch_embedding",
                f"{tower}.embeddings.patch_embedding",
                features,
                d,
                bias=True,
                kernel=(channels, patch, patch),
            ),
            Positions("positions", f"{tower}.embeddings.position_embedding.weight", "order", side**2, d),
        ),
        layers=VisionLayers(
            count=integer(vision, "num_hidden_layers", 12),
            hidden_size=d,
            intermediate_size=integer(vision, "intermediate_size", 3072),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            norm=norm,
            places=Places("layer_norm1", None, "layer_norm2"),
            names=LayerNames(f"{tower}.encoder.layers", out="out_proj"),
            activation=_activation(vision, "hidden_act", "gelu_pytorch_tanh"),
            scale=head_dim**-0.5,
            biases=("q", "k", "v", "o", "mlp"),
        ),
        pooler=(
            Normalize("post_layernorm", f"{tower}.post_layernorm", d, norm),
            TileMean(size=side // pooled),
        ),
        projector=(
            Normalize("norm", f"{projector}.mm_soft_emb_norm", d, Norm(norm.eps, offset=1.0, wide=True)),
            Linear(
                "projection",
                f"{projector}.mm_input_projection_weight",
                d,
                text.hidden_size,
                inputs_first=True,
                tensor="",
            ),
        ),
        patches=side**2,
        patches_of_feature=(side // pooled) ** 2,
        both_ways=(FULL, SLIDING),
    )


def _gemma4(
    config: Mapping[str, Any], vision: Mapping[str, Any], text: DecoderArchitecture, prefixes: Prefixes
) -> VisionArchitecture:
    """Gemma 4's tower: pictures of any size, whose patches are averaged over squares."""
    _is(vision, "gemma4_vision")
    d, heads = integer(vision, "hidden_size", 768), integer(vision, "num_attention_heads", 12)
    head_dim, kv_heads = integer(vision, "head_dim", 64), integer(vision, "num_key_value_heads", 12)
    if head_dim % 4 or heads % kv_heads:
        raise UnsupportedCheckpoint(
            f"config.json: {VISION} has {heads} heads of {head_dim} features and {kv_heads} key/value heads; "
            "4 must divide the features, and the last number the first",
            VISION,
        )
    norm = Norm(number(vision, "rms_norm_eps", 1e-6), wide=True)
    block, features = (
        integer(vision, "pooling_kernel_size", 3) ** 2,
        3 * integer(vision, "patch_size", 16) ** 2,
    )
    tower, standardized = "vision_tower", _flag(vision, "standardize")
    scaled = (
        Rescale("standardized", f"{tower}.std", d**0.5, features=d)
        if standardized
        else Rescale(factor=d**0.5)
    )
    return VisionArchitecture(
        kind="Gemma 4",
        prefixes=prefixes,
        patch_features=features,
        text_size=text.hidden_size,
        embedder=(
            Rescale(factor=2.0, shift=-1.0),
            Linear("patch_embedding", f"{tower}.patch_embedder.input_proj", features, d),
            Positions(
                "positions",
                f"{tower}.patch_embedder.position_embedding_table",
                "axes",
                integer(vision, "position_embedding_size", 10_240),
                d,
            ),
        ),
        layers=VisionLayers(
            count=integer(vision, "num_hidden_layers", 16),
            hidden_size=d,
            intermediate_size=integer(vision, "intermediate_size", 3072),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            norm=norm,
            places=AROUND,
            names=LayerNames(f"{tower}.encoder.layers", inner=".linear"),
            activation=_activation(vision, "hidden_activation", "gelu_pytorch_tanh"),
            scale=1.0,
            gated=True,
            qk_norm=True,
            value_norm=True,
            clipped=_flag(vision, "use_clipped_linears"),
            turning=Turning(_theta(vision, 100.0), "xy", pairs="parts"),
        ),
        pooler=(Mean(count=block), scaled),
        projector=(
            Normalize(features=d, norm=Norm(norm.eps, weighted=False)),
            Linear("projection", "embed_vision.embedding_projection", d, text.hidden_size),
        ),
        patches_of_feature=block,
        padding=count(text_config(config), "pad_token_id"),
        **_seen(config, None),
    )


def _gemma4_unified(
    config: Mapping[str, Any], vision: Mapping[str, Any], text: DecoderArchitecture, prefixes: Prefixes
) -> VisionArchitecture:
    """Gemma 4 12B has no tower: its patches are larger, and projected alone."""
    _is(vision, "gemma4_unified_vision")
    side = integer(vision, "patch_size", 16) * integer(vision, "pooling_kernel_size", 3)
    features, d, held = 3 * side**2, integer(vision, "mm_embed_dim", 3840), "vision_embedder"
    norm = _layer_norm(1e-5)
    built_in(vision, "output_proj_dims", d, "this projector")
    return VisionArchitecture(
        kind="Gemma 4 12B",
        prefixes=prefixes,
        patch_features=features,
        text_size=text.hidden_size,
        embedder=(
            Normalize("patch_norm", f"{held}.patch_ln1", features, norm),
            Linear("patch_embedding", f"{held}.patch_dense", features, d, bias=True),
            Normalize("norm", f"{held}.patch_ln2", d, norm),
            Positions(
                "positions",
                f"{held}.pos_embedding",
                "axes",
                integer(vision, "mm_posemb_size", 1120),
                d,
                axis=1,
            ),
            Normalize("positions_norm", f"{held}.pos_norm", d, norm),
        ),
        layers=None,
        projector=(
            Normalize(features=d, norm=Norm(number(vision, "rms_norm_eps", 1e-6), weighted=False)),
            Linear("projection", "embed_vision.embedding_projection", d, text.hidden_size),
        ),
        **_seen(config, "vision"),
    )


def _pixtral(
    config: Mapping[str, Any], vision: Mapping[str, Any], text: DecoderArchitecture, prefixes: Prefixes
) -> VisionArchitecture:
    """Pixtral (https://arxiv.org/abs/2410.07073), with the projector of Mistral 3 or of LLaVA."""
    _is(vision, "pixtral")
    d, heads, head_dim = _heads(vision, 1024, 16)
    if head_dim % 4:
        raise UnsupportedCheckpoint(
            f"config.json: a head of {VISION} has {head_dim} features, which 4 does not divide", VISION
        )
    patch, channels = integer(vision, "patch_size", 16), integer(vision, "num_channels", 3)
    built_in(config, "vision_feature_layer", -1, "Pixtral")
    norm, tower = Norm(1e-5), "vision_tower"
    layers = VisionLayers(
        count=integer(vision, "num_hidden_layers", 24),
        hidden_size=d,
        intermediate_size=integer(vision, "intermediate_size", 4096),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        norm=norm,
        places=Places("attention_norm", None, "ffn_norm"),
        names=LayerNames(f"{tower}.transformer.layers", "attention", "feed_forward"),
        activation=_activation(vision, "hidden_act", "gelu"),
        scale=head_dim**-0.5,
        gated=True,
        turning=Turning(_theta(vision, 10_000.0), alternating=True),
    )
    merging = config.get("model_type") == "mistral3"
    block = integer(config, "spatial_merge_size", 2) ** 2 if merging else 1
    features = channels * patch**2
    return VisionArchitecture(
        kind="Pixtral",
        prefixes=prefixes,
        patch_features=features,
        text_size=text.hidden_size,
        embedder=(
            Linear("patch_conv", f"{tower}.patch_conv", features, d, kernel=(channels, patch, patch)),
            Normalize("norm", f"{tower}.ln_pre", d, norm),
        ),
        layers=layers,
        projector=_projector(config, d, text, block if merging else 0),
        patches_of_feature=block,
    )


def _llava(
    config: Mapping[str, Any], vision: Mapping[str, Any], text: DecoderArchitecture, prefixes: Prefixes
) -> VisionArchitecture:
    """LLaVA 1.5 (https://arxiv.org/abs/2310.03744): CLIP, of which the last layers are not computed."""
    d, heads, head_dim = _heads(vision, 768, 12)
    patch, channels = integer(vision, "patch_size", 32), integer(vision, "num_channels", 3)
    side, layers = integer(vision, "image_size", 224) // patch, integer(vision, "num_hidden_layers", 12)
    built_in(config, "vision_feature_select_strategy", "default", "LLaVA")
    chosen = config.get("vision_feature_layer", -2)
    if not isinstance(chosen, int) or not -layers <= chosen < 0:
        raise UnsupportedCheckpoint(
            f"config.json: vision_feature_layer is {chosen!r}, none of {layers} layers counted from the end",
            "vision_feature_layer",
        )
    norm, tower = _layer_norm(number(vision, "layer_norm_eps", 1e-5)), "vision_tower"
    features, embeddings = channels * patch**2, f"{tower}.embeddings"
    return VisionArchitecture(
        kind="CLIP",
        prefixes=prefixes,
        patch_features=features,
        text_size=text.hidden_size,
        embedder=(
            Linear(
                *("patch_embedding", f"{embeddings}.patch_embedding", features, d),
                kernel=(channels, patch, patch),
            ),
            ClassToken("class_token", f"{embeddings}.class_embedding", d, first=True),
            Positions("positions", f"{embeddings}.position_embedding.weight", "order", side**2 + 1, d),
            Normalize("norm", f"{tower}.pre_layrnorm", d, norm),
        ),
        layers=VisionLayers(
            count=layers + 1 + chosen,
            hidden_size=d,
            intermediate_size=integer(vision, "intermediate_size", 3072),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            norm=norm,
            places=Places("layer_norm1", None, "layer_norm2"),
            names=LayerNames(f"{tower}.encoder.layers", out="out_proj"),
            activation=_activation(vision, "hidden_act", "quick_gelu"),
            scale=head_dim**-0.5,
            biases=("q", "k", "v", "o", "mlp"),
        ),
        pooler=(DropClassToken(first=True),),
        projector=_projector(config, d, text, 0),
        patches=side**2,
    )


def _projector(
    config: Mapping[str, Any], features: int, text: DecoderArchitecture, block: int
) -> tuple[Step, ...]:
    """Return the projector of Mistral 3, or for a block of 0 that of LLaVA."""
    held, bias = "multi_modal_projector", _flag(config, "multimodal_projector_bias", not block)
    merger = f"{held}.patch_merger.merging_layer"
    first = (
        Normalize("norm", f"{held}.norm", features, Norm(text.norm.eps)),
        Merge(count=block, features_first=True),
        Linear("merging_layer", merger, features * block, features),
    )
    return (
        *(first if block else ()),
        Linear("linear_1", f"{held}.linear_1", features, text.hidden_size, bias),
        Activate(function=_activation(config, "projector_hidden_act", "gelu")),
        Linear("linear_2", f"{held}.linear_2", text.hidden_size, text.hidden_size, bias),
    )


def _qwen2(
    config: Mapping[str, Any], vision: Mapping[str, Any], text: DecoderArchitecture, prefixes: Prefixes
) -> VisionArchitecture:
    """Qwen 2 VL (https://arxiv.org/abs/2409.12191), whose config.json names other sizes than later ones."""
    _is(vision, "qwen2_vl", "qwen2_vl_vision")
    d, ratio = integer(vision, "embed_dim", 1280), number(vision, "mlp_ratio", 4.0)
    vision = {
        **{"depth": 32, "patch_size": 14},
        **vision,
        "hidden_size": d,
        "intermediate_size": int(d * ratio),
        "out_hidden_size": integer(vision, "hidden_size", 3584),
    }
    merger, norm = "visual.merger", _layer_norm(1e-6)
    tower = _qwen("Qwen 2 VL", vision, text, prefixes, norm, "quick_gelu")
    assert tower.layers is not None
    names = replace(tower.layers.names, plain=("fc1", "fc2"))
    return replace(
        tower,
        layers=replace(tower.layers, names=names),
        projector=_joined("ln_q", (f"{merger}.mlp.0", f"{merger}.mlp.2"), merger, d, vision, norm),
    )


def _qwen2_5(
    config: Mapping[str, Any], vision: Mapping[str, Any], text: DecoderArchitecture, prefixes: Prefixes
) -> VisionArchitecture:
    """Qwen 2.5 VL (https://arxiv.org/abs/2502.13923): most layers see a window of the picture."""
    vision = {
        **{"depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "window_size": 112},
        **{"patch_size": 14, "out_hidden_size": 3584, "fullatt_block_indexes": [7, 15, 23, 31]},
        **vision,
    }
    _is(vision, "qwen2_5_vl", "qwen2_5_vl_vision")
    merge, patch, norm = integer(vision, "spatial_merge_size", 2), integer(vision, "patch_size"), Norm(1e-6)
    merger, d = "visual.merger", integer(vision, "hidden_size")
    full = vision["fullatt_block_indexes"]
    if not isinstance(full, list | tuple) or not all(isinstance(layer, int) for layer in full):
        raise UnsupportedCheckpoint(
            f"config.json: fullatt_block_indexes of {VISION} is {full!r}, not a list of layers", VISION
        )
    window = integer(vision, "window_size") // merge // patch * merge
    if not window:
        raise UnsupportedCheckpoint(
            f"config.json: window_size of {VISION} is smaller than {merge} patches of {patch} pixels", VISION
        )
    tower = _qwen("Qwen 2.5 VL", vision, text, prefixes, norm, "silu")
    assert tower.layers is not None
    return replace(
        tower,
        layers=replace(tower.layers, gated=True, window=window, full=tuple(full)),
        projector=_joined("ln_q", (f"{merger}.mlp.0", f"{merger}.mlp.2"), merger, d, vision, norm),
    )


def _qwen3(
    config: Mapping[str, Any], vision: Mapping[str, Any], text: DecoderArchitecture, prefixes: Prefixes
) -> VisionArchitecture:
    """Qwen 3 VL (https://arxiv.org/abs/2511.21631), and Qwen 3.5, whose tower has no deepstack."""
    vision = {
        **{"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16},
        **{"out_hidden_size": 3584, "num_position_embeddings": 2304},
        **vision,
    }
    deep = config.get("model_type") in ("qwen3_vl", "qwen3_vl_moe")
    d, norm, norms = integer(vision, "hidden_size"), _layer_norm(1e-6), ("linear_fc1", "linear_fc2")
    places = integer(vision, "num_position_embeddings")
    if math.isqrt(places) ** 2 != places:
        raise UnsupportedCheckpoint(
            f"config.json: num_position_embeddings of {VISION} is {places}, which is not a square", VISION
        )
    listed = vision.get("deepstack_visual_indexes", [8, 16, 24]) if deep else []
    depth, deepstack = integer(vision, "depth"), []
    if not isinstance(listed, list | tuple) or not all(layer in range(depth) for layer in listed):
        raise UnsupportedCheckpoint(
            f"config.json: deepstack_visual_indexes of {VISION} is {listed!r}, which names no layers of "
            f"{depth}",
            VISION,
        )
    for i, layer in enumerate(listed):
        held = f"visual.deepstack_merger_list.{i}"
        names = (f"{held}.{norms[0]}", f"{held}.{norms[1]}")
        deepstack.append((layer, _joined("norm", names, held, d, vision, norm, after=True)))
    merger = "visual.merger"
    tower = _qwen("Qwen 3 VL" if deep else "Qwen 3.5", vision, text, prefixes, norm, "gelu_pytorch_tanh")
    (embed,) = tower.embedder
    assert isinstance(embed, Linear)
    return replace(
        tower,
        embedder=(
            replace(embed, bias=True),
            Positions("positions", "visual.pos_embed.weight", "grid", places, d),
        ),
        projector=_joined("norm", (f"{merger}.{norms[0]}", f"{merger}.{norms[1]}"), merger, d, vision, norm),
        deepstack=tuple(deepstack),
    )


def _joined(
    norm_name: str,
    names: tuple[str, str],
    module: str,
    features: int,
    vision: Mapping[str, Any],
    norm: Norm,
    after: bool = False,
) -> tuple[Step, ...]:
    """Return a merger of Qwen's towers.

    Args:
        after: whether the norm is of the joined features, rather than of each patch.
    """
    block = integer(vision, "spatial_merge_size", 2) ** 2
    wide, merge = features * block, Merge(count=block)
    normalize = Normalize("norm", f"{module}.{norm_name}", wide if after else features, norm)
    return (
        *((merge, normalize) if after else (normalize, merge)),
        Linear("linear_1", names[0], wide, wide, bias=True),
        Activate(function="gelu"),
        Linear("linear_2", names[1], wide, integer(vision, "out_hidden_size"), bias=True),
    )


def _qwen(
    kind: str,
    vision: Mapping[str, Any],
    text: DecoderArchitecture,
    prefixes: Prefixes,
    norm: Norm,
    activation: str,
) -> VisionArchitecture:
    """Return what Qwen's towers share.

    Args:
        activation: if config.json does not name one.
    """
    if not text.turned_axes:
        raise UnsupportedCheckpoint(
            "config.json: rope_parameters has no mrope_section, by which heads turn with rows and columns",
            "mrope_section",
        )
    d, heads, head_dim = _heads(vision, 0, 16, "num_heads")
    if head_dim % 4:
        raise UnsupportedCheckpoint(
            f"config.json: a head of {VISION} has {head_dim} features, which 4 does not divide", VISION
        )
    if integer(vision, "out_hidden_size") != text.hidden_size:
        raise UnsupportedCheckpoint(
            f"config.json: out_hidden_size of {VISION} is {vision['out_hidden_size']}, and the language "
            f"model has {text.hidden_size} features",
            VISION,
        )
    side, channels = integer(vision, "patch_size"), integer(vision, "in_channels", 3)
    kernel = (channels, integer(vision, "temporal_patch_size", 2), side, side)
    features = math.prod(kernel)
    return VisionArchitecture(
        kind=kind,
        prefixes=prefixes,
        patch_features=features,
        text_size=text.hidden_size,
        embedder=(Linear("patch_embed", "visual.patch_embed.proj", features, d, kernel=kernel),),
        layers=VisionLayers(
            count=integer(vision, "depth"),
            hidden_size=d,
            intermediate_size=integer(vision, "intermediate_size"),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            norm=norm,
            places=Places("norm1", None, "norm2"),
            names=LayerNames("visual.blocks", "attn", out="proj", plain=("linear_fc1", "linear_fc2")),
            activation=_activation(vision, "hidden_act", activation),
            scale=head_dim**-0.5,
            biases=("q", "k", "v", "o", "mlp"),
            fused=True,
            turning=Turning(10_000.0),
        ),
        projector=(),
        patches_of_feature=integer(vision, "spatial_merge_size", 2) ** 2,
    )


def _paddleocr(
    config: Mapping[str, Any], vision: Mapping[str, Any], text: DecoderArchitecture, prefixes: Prefixes
) -> VisionArchitecture:
    """PaddleOCR-VL (https://arxiv.org/abs/2510.14528): SigLIP for pictures of any size, whose heads turn."""
    _is(vision, "paddleocr_vl_vision", "paddleocr_vl")
    if not text.turned_axes:
        raise UnsupportedCheckpoint(
            "config.json: rope_parameters has no mrope_section, by which heads turn with rows and columns",
            "mrope_section",
        )
    d, heads, head_dim = _heads(vision, 1152, 16)
    patch, channels = integer(vision, "patch_size", 14), integer(vision, "num_channels", 3)
    side, merge = integer(vision, "image_size", 384) // patch, integer(vision, "spatial_merge_size", 2)
    if head_dim % 4:
        raise UnsupportedCheckpoint(
            f"config.json: a head of {VISION} has {head_dim} features, which 4 does not divide", VISION
        )
    norm, tower = _layer_norm(number(vision, "layer_norm_eps", 1e-6)), "visual.vision_model"
    projector = "projector"
    features, embedded = channels * patch**2, f"{tower}.embeddings.patch_embedding"
    names = (f"{projector}.linear_1", f"{projector}.linear_2")
    joined = {"spatial_merge_size": merge, "out_hidden_size": text.hidden_size}
    return VisionArchitecture(
        kind="PaddleOCR-VL",
        prefixes=prefixes,
        patch_features=features,
        text_size=text.hidden_size,
        embedder=(
            Linear("patch_embedding", embedded, features, d, bias=True, kernel=(channels, patch, patch)),
            Positions("positions", f"{tower}.embeddings.position_embedding.weight", "areas", side**2, d),
        ),
        layers=VisionLayers(
            count=integer(vision, "num_hidden_layers", 27),
            hidden_size=d,
            intermediate_size=integer(vision, "intermediate_size", 4304),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            norm=norm,
            places=Places("layer_norm1", None, "layer_norm2"),
            names=LayerNames(f"{tower}.encoder.layers", out="out_proj"),
            activation=_activation(vision, "hidden_act", "gelu_pytorch_tanh"),
            scale=head_dim**-0.5,
            biases=("q", "k", "v", "o", "mlp"),
            turning=Turning(10_000.0),
        ),
        pooler=(Normalize("post_layernorm", f"{tower}.post_layernorm", d, norm),),
        projector=_joined("pre_norm", names, projector, d, joined, _layer_norm(1e-5)),
        patches_of_feature=merge**2,
    )


def _llama4(
    config: Mapping[str, Any], vision: Mapping[str, Any], text: DecoderArchitecture, prefixes: Prefixes
) -> VisionArchitecture:
    """Llama 4's tower reads tiles of one size."""
    _is(vision, "llama4_vision_model")
    d, heads, head_dim = _heads(vision, 768, 16)
    patch, channels = integer(vision, "patch_size", 14), integer(vision, "num_channels", 3)
    side, ratio = integer(vision, "image_size", 448) // patch, number(vision, "pixel_shuffle_ratio", 0.5)
    if head_dim % 4 or not (side * ratio).is_integer() or not (d / ratio).is_integer() or ratio > 1:
        raise UnsupportedCheckpoint(
            f"config.json: {VISION} has {head_dim} features a head, {side} x {side} patches of {d} features "
            f"and a pixel_shuffle_ratio of {ratio:g}, which do not fit each other",
            VISION,
        )
    wide = integer(vision, "intermediate_size", 5632)
    into, out = integer(vision, "projector_input_dim", 4096), integer(vision, "projector_output_dim", 4096)
    built_in(vision, "vision_output_dim", out, "this projector")
    built_in(vision, "intermediate_size", int(d / ratio**2), "this projector")
    norm, tower = _layer_norm(1e-5), "vision_model"
    features = channels * patch**2
    return VisionArchitecture(
        kind="Llama 4",
        prefixes=prefixes,
        patch_features=features,
        text_size=text.hidden_size,
        embedder=(
            Linear("patch_embedding", f"{tower}.patch_embedding.linear", features, d),
            ClassToken("class_token", f"{tower}.class_embedding", d),
            Positions("positions", f"{tower}.positional_embedding_vlm", "order", side**2 + 1, d),
            Normalize("norm", f"{tower}.layernorm_pre", d, norm),
        ),
        layers=VisionLayers(
            count=integer(vision, "num_hidden_layers", 34),
            hidden_size=d,
            intermediate_size=wide,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            norm=norm,
            places=Places(),
            names=LayerNames(f"{tower}.model.layers"),
            activation="gelu",
            scale=head_dim**-0.5,
            biases=("q", "k", "v", "o", "mlp"),
            turning=Turning(_theta(vision, 10_000.0), "xy", pairs="neighbors", first=1),
        ),
        pooler=(
            Normalize("norm", f"{tower}.layernorm_post", d, norm),
            DropClassToken(),
            PixelShuffle(ratio=ratio),
            Linear("fc1", f"{tower}.vision_adapter.mlp.fc1", int(d / ratio**2), into),
            Activate(function="gelu"),
            Linear("fc2", f"{tower}.vision_adapter.mlp.fc2", into, out),
            Activate(function="gelu"),
        ),
        projector=(Linear("linear_1", "multi_modal_projector.linear_1", out, text.hidden_size),),
        patches=side**2,
        patches_of_feature=round(1 / ratio**2),
    )


Reader = Callable[[Mapping[str, Any], Mapping[str, Any], DecoderArchitecture, Prefixes], VisionArchitecture]

READERS: dict[str, tuple[str, Reader]] = {
    "gemma3": ("Gemma 3", _gemma3),
    "gemma4": ("Gemma 4", _gemma4),
    "gemma4_unified": ("Gemma 4", _gemma4_unified),
    "llava": ("LLaVA 1.5", _llava),
    "mistral3": ("Mistral 3", _pixtral),
    "qwen2_vl": ("Qwen 2 VL", _qwen2),
    "qwen2_5_vl": ("Qwen 2.5 VL", _qwen2_5),
    "qwen3_vl": ("Qwen 3 VL", _qwen3),
    "qwen3_vl_moe": ("Qwen 3 VL", _qwen3),
    "qwen3_5": ("Qwen 3.5", _qwen3),
    "qwen3_5_moe": ("Qwen 3.5", _qwen3),
    "llama4": ("Llama 4", _llama4),
    "paddleocr_vl": ("PaddleOCR-VL", _paddleocr),
}
"""The models whose towers are computed here, by the model type of config.json: their name, and the reader."""


def _heads(
    vision: Mapping[str, Any], hidden: int, heads: int, key: str = "num_attention_heads"
) -> tuple[int, int, int]:
    """Read the tower's features, its heads, and the features of a head."""
    d, n = integer(vision, "hidden_size", hidden), integer(vision, key, heads)
    if d % n:
        raise UnsupportedCheckpoint(
            f"config.json: hidden_size of {VISION} is {d}, which {n} heads do not divide", VISION
        )
    return d, n, d // n


def _layer_norm(eps: float) -> Norm:
    return Norm(eps, centered=True, bias=True, wide=True)


def _is(vision: Mapping[str, Any], *known: str) -> None:
    """Refuse a tower of another model type."""
    kind = vision.get("model_type", known[0])
    if kind not in known:
        raise UnsupportedCheckpoint(
            f"config.json: model_type of {VISION} is {kind!r}; known is {known[0]!r}", VISION
        )


def _activation(place: Mapping[str, Any], key: str, default: str) -> str:
    activation = place.get(key) or default
    if activation not in ACTIVATIONS or activation == "xielu":
        raise UnsupportedCheckpoint(
            f"config.json: {key} is {activation!r}; known are {', '.join(ACTIVATIONS)}", key
        )
    return str(activation)


def _theta(vision: Mapping[str, Any], default: float) -> float:
    """Read the base frequency; towers rotate without scaling."""
    scaling = section(vision, "rope_parameters")
    if scaling.get("rope_type") != "axial":  # how later versions name it
        built_in(scaling, "rope_type", "default", "a tower")
    return number(scaling if scaling.get("rope_theta") is not None else vision, "rope_theta", default)


def _flag(place: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = place.get(key)
    if value is not None and not isinstance(value, bool):
        raise UnsupportedCheckpoint(f"config.json: {key} is {value!r}, not true or false", key)
    return default if value is None else value


def _seen(config: Mapping[str, Any], default: str | None) -> dict[str, Any]:
    """Return what the tokens of a picture see in Gemma 4's decoder."""
    both = section(config, "text_config").get("use_bidirectional_attention", default) == "vision"
    return {"both_ways": (SLIDING,) if both else (), "within_window": both}
