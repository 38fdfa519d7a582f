"""A run's float32 results for servers: the merged folder and the adapter; and a tiny Gemma 4."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from recipec.compiler.catalog import facts_of
from recipec.compiler.miniature.small_checkpoint import write_tokenizer
from recipec.runtime.merging import merge
from recipec.runtime.settings import ModelSettings
from tests import tiny

MEDIA = {
    f"{name}_token_id": facts_of("gemma4").tokens.special.index(marker)
    for name, marker in {
        "boi": "<|image>",
        "image": "<|image|>",
        "eoi": "<image|>",
        "video": "<|video|>",
        "boa": "<|audio>",
        "audio": "<|audio|>",
    }.items()
}
"""The ids in config.json of the tokenizer's special tokens."""


@dataclass(frozen=True)
class Merged:
    """A base model and a run's float32 results: the merged folder and the adapter.

    Attributes:
        prompts: token ids, of odd and different lengths.
        question: a user's turn.
        keys: the results of another run on the same base, which trained only k_proj.
        ended: a prompt, and the answer that ends at the run's own end token; None if the run has none.
    """

    base: Path
    merged: Path
    adapter: Path
    prompts: list[list[int]]
    question: str
    keys: tuple[Path, Path] | None = None
    ended: tuple[list[int], list[int]] | None = None


def merged_in_float32(base: Path, family: str, run: Path, folder: Path) -> tuple[Path, Path]:
    """Merge a run into `folder`, and return its merged folder and its adapter folder."""
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
    """Make a tiny Gemma 4 that vLLM loads, and that does not only repeat a prompt's last token."""
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
            # Make the layers outweigh the embedding, which alone would repeat the last token.
            if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
                parameter.mul_(8)
        # Never generate the tokens of images and sounds, for which transformers would look for an image.
        model.get_input_embeddings().weight[[*MEDIA.values()]] = 0
    for name, token in MEDIA.items():
        setattr(model.config, name, token)
    model.config.vision_config.default_output_length = 280
    model.save_pretrained(directory, max_shard_size="1MB")
    write_tokenizer(directory, "gemma4")
