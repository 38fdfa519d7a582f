"""Tensors of a miniature's vision tower, which training leaves alone and merging copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def gemma4(vision: Mapping[str, Any], text_hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, wide, head_dim = vision["hidden_size"], vision["intermediate_size"], vision["head_dim"]
    inner = vision["num_attention_heads"] * head_dim
    tower = "model.vision_tower"
    yield f"{tower}.patch_embedder.input_proj.weight", (hidden, 3 * vision["patch_size"] ** 2)
    yield (
        f"{tower}.patch_embedder.position_embedding_table",
        (2, vision["position_embedding_size"], hidden),
    )
    for i in range(vision["num_hidden_layers"]):
        layer = f"{tower}.encoder.layers.{i}"
        for name in "qkv":
            yield f"{layer}.self_attn.{name}_proj.linear.weight", (inner, hidden)
        yield f"{layer}.self_attn.o_proj.linear.weight", (hidden, inner)
        for name in "qk":
            yield f"{layer}.self_attn.{name}_norm.weight", (head_dim,)
        yield f"{layer}.mlp.gate_proj.linear.weight", (wide, hidden)
        yield f"{layer}.mlp.up_proj.linear.weight", (wide, hidden)
        yield f"{layer}.mlp.down_proj.linear.weight", (hidden, wide)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield f"{layer}.{name}_layernorm.weight", (hidden,)
    yield "model.embed_vision.embedding_projection.weight", (text_hidden, hidden)


def gemma3(vision: Mapping[str, Any], text_hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, wide, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    tower = "model.vision_tower"

    def dense(name: str, rows: int, columns: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (rows, columns)
        yield f"{name}.bias", (rows,)

    def norm(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (hidden,)
        yield f"{name}.bias", (hidden,)

    embeddings = f"{tower}.embeddings"
    yield f"{embeddings}.patch_embedding.weight", (hidden, vision["num_channels"], patch, patch)
    yield f"{embeddings}.patch_embedding.bias", (hidden,)
    yield f"{embeddings}.position_embedding.weight", ((vision["image_size"] // patch) ** 2, hidden)
    for i in range(vision["num_hidden_layers"]):
        layer = f"{tower}.encoder.layers.{i}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from dense(f"{layer}.self_attn.{name}", hidden, hidden)
        yield from norm(f"{layer}.layer_norm1")
        yield from norm(f"{layer}.layer_norm2")
        yield from dense(f"{layer}.mlp.fc1", wide, hidden)
        yield from dense(f"{layer}.mlp.fc2", hidden, wide)
    yield from norm(f"{tower}.post_layernorm")
    yield "model.multi_modal_projector.mm_input_projection_weight", (hidden, text_hidden)
    yield "model.multi_modal_projector.mm_soft_emb_norm.weight", (hidden,)
