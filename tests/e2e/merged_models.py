"""What a run comes to in float32, for servers: the merged folder and the adapter; and a tiny Gemma 4."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from recipec.compiler.lowering.families import FAMILIES
from recipec.compiler.rehearse.miniature import write_tokenizer
from recipec.runtime.merging import merge
from recipec.runtime.settings import ModelSettings
from tests import tiny

MEDIA = {
    f"{name}_token_id": FAMILIES["gemma4"].tokens.special.index(marker)
    for name, marker in {
        "boi": "<|image>",
        "image": "<|image|>",
        "eoi": "<image|>",
        "video": "<|video|>",
        "boa": "<|audio>",
        "audio": "<|audio|>",
    }.items()
}
"""The ids in config.json, of the tokenizer's own markers."""


@dataclass(frozen=True)
class Merged:
    """A base, and a run's outcome in float32: the merged folder and the adapter.

    Attributes:
        prompts: token ids, of odd and different lengths.
        question: a user's turn.
        keys: another outcome on the same base, trained on k_proj alone.
    """

    base: Path
    merged: Path
    adapter: Path
    prompts: list[list[int]]
    question: str
    keys: tuple[Path, Path] | None = None


def merged_in_float32(base: Path, family: str, run: Path, folder: Path) -> tuple[Path, Path]:
    """The merged folder and the adapter's that merging a run writes into `folder`."""
    status = merge.main(
        folder,
        ModelSettings(id=str(base), family=family),
        checkpoint=str(run),
        output="merged",
        dtype="float32",
        adapter=True,
        argv=["--model", str(base), "--output", str(folder)],
    )
    assert status == 0
    return folder / "merged", folder / "merged-adapter"


def make_gemma4(directory: Path) -> None:
    """A tiny Gemma 4 that vLLM loads, and whose answers are more than its prompts' last tokens."""
    import torch

    model = tiny.make_gemma4(
        directory.with_name("small"),
        vocab_size=512,
        vocab_size_per_layer_input=512,
        head_dim=32,
        global_head_dim=64,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # What the layers add outweighs the embedding, which by itself says the last token again.
            if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
                parameter.mul_(8)
        # What stands for images and sounds is never said: transformers would take what it said itself for
        # the place of an image that is not there.
        model.get_input_embeddings().weight[[*MEDIA.values()]] = 0
    for name, token in MEDIA.items():
        setattr(model.config, name, token)
    model.config.vision_config.default_output_length = 280
    model.save_pretrained(directory, max_shard_size="1MB")
    write_tokenizer(directory, "gemma4")
