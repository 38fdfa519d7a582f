"""A checkpoint, a server that computes its answers from a checkpoint, and the command that compares them."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipec.compiler.rehearse.miniature import write_tokenizer
from recipec.compiler.serving import verify_reference
from recipec.compiler.serving.verify import VerifyOptions, verify
from recipec.compiler.serving.verify_reference import Reference, ReferenceTokenizer, ServedTypes
from tests import tiny
from tests.serving.fake_language import END, Language, Ranked, Said
from tests.serving.fake_vllm import FakeVllm

TOKENS = 3


def made(folder: Path, seed: int = 0, vocabulary: int = 512) -> Path:
    """Make a tiny Gemma 3 that does not only repeat a prompt's last token."""
    import torch

    model = tiny.make_gemma3(
        folder,
        seed=seed,
        vocab_size=vocabulary,
        num_hidden_layers=2,
        layer_types=["sliding_attention"] * 2,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Make the layers outweigh the embedding, which alone would repeat the last token.
            if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
                parameter.add_(7)
    model.save_pretrained(folder)
    write_tokenizer(folder, "gemma3")
    return folder


class Computed(Language):
    """A server's language that a checkpoint computes.

    Args:
        types: the types that the server computes in; None for float32.
        rank: the rank of the chosen token; 0 is the likeliest.
    """

    def __init__(self, folder: Path, types: ServedTypes | None = None, rank: int = 0) -> None:
        super().__init__()
        self.tokens = ReferenceTokenizer(folder)
        self.reference = Reference(folder, verify_reference.read_config(folder), "float32")
        self.kv_cache = types.kv_cache if types else "auto"
        self.rank = rank
        if types:
            self.reference.lower(types)
        self.logprobs = functools.cache(self._logprobs)

    def _logprobs(self, prefix: tuple[int, ...]) -> Any:
        return self.reference.logprobs(prefix, [0], self.kv_cache)[0]

    def encode(self, text: str) -> list[int]:
        return list(self.tokens.of_text(text))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return list(self.tokens.of_chat(messages))

    def decode(self, tokens: Any) -> str:
        return self.tokens.show(list(tokens))

    def predict(self, model: str, prefix: Sequence[int]) -> Ranked:
        values = self.logprobs(tuple(prefix))
        likeliest = values.argsort()[::-1][:8]
        return [(int(token), float(values[token])) for token in likeliest]

    def logprob(self, model: str, prefix: Sequence[int], token: int) -> float:
        return float(self.logprobs(tuple(prefix))[token])

    def answer(
        self, model: str, prompt: Sequence[int], asked: str, request: Mapping[str, Any], sample: int
    ) -> Said:
        said: list[int] = []
        while len(said) < request["max_tokens"] and END not in said:
            said.append(self.predict(model, [*prompt, *said])[self.rank][0])
        return Said(said, "stop" if END in said else "length")


def check(server: FakeVllm, folder: Path, **more: Any) -> dict[str, Any]:
    options = {"tokens": TOKENS, "server_dtype": "float32", **more}
    return verify(VerifyOptions(server.url, model=folder, **options))


def changed(checkpoint: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Copy the checkpoint with other weights."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, folder)
    arrays = load_file(folder / "model.safetensors")
    change(arrays)
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
