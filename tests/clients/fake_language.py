"""The fake vLLM's tokenizer and language model, which use hashes and answer equally everywhere."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Ranked = list[tuple[int, float]]
"""Candidates for the next token with their log probabilities, the likeliest first."""

BOS, END, TURN, TURN_END = 2, 1, 4, 5
BYTES = 16
"""Tokens are bytes from here on, and words from `WORDS` on."""
WORDS = 300
VOCABULARY = """
one two three four five six seven eight red green blue white black gray north south east west up down left
right sun moon star rain snow wind sea hill tree leaf root bird fish bread salt milk tea house door wall roof
road bridge ship wheel clock bell book page ink song drum horn king queen child friend baker smith sailor
farmer poet judge""".split()  # noqa: SIM905 (a list would be 64 lines)


class Language:
    """A tokenizer and a language model. Pass FakeVllm another one with the same methods for other answers.

    Args:
        seeds: the seed of a model's answers, by its name. Models with the same seed answer equally. The
            default seed is the model's name.
        shifts: the shift of a model's log probability of the likeliest token, by its name.
        script: a function of the model, the prompt's text and the sample's number that returns an answer's
            text, or None for a random one. A chat's prompt is its last message.
    """

    def __init__(
        self,
        seeds: Mapping[str, str] | None = None,
        shifts: Mapping[str, float] | None = None,
        script: Callable[[str, str, int], str | None] | None = None,
    ) -> None:
        self.seeds = dict(seeds or {})
        self.shifts = dict(shifts or {})
        self.script = script

    def encode(self, text: str) -> list[int]:
        return [BOS, *(BYTES + byte for byte in text.encode())]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        tokens = [BOS]
        for message in messages:
            turn = f"{message['role']}\n{text_of(message['content'])}"
            tokens += [TURN, *self.encode(turn)[1:], TURN_END]
        return [*tokens, TURN, *self.encode("assistant\n")[1:]]

    def decode(self, tokens: Iterable[int]) -> str:
        """Decode tokens without special tokens, as with skip_special_tokens."""
        data = b""
        for token in tokens:
            if token >= WORDS:
                data += b" " + VOCABULARY[(token - WORDS) % len(VOCABULARY)].encode()
            elif token >= BYTES:
                data += bytes([(token - BYTES) % 256])
        return data.decode("utf-8", "replace")

    def predict(self, model: str, prefix: Sequence[int]) -> Ranked:
        """Return the candidates after `prefix`, ranked."""
        text = f"{self.seeds.get(model, model)}\0{' '.join(map(str, prefix))}"
        digest = hashlib.sha256(text.encode()).digest()
        words = dict.fromkeys(WORDS + byte % len(VOCABULARY) for byte in digest[:16])
        candidates = [END, *words] if digest[16] < 8 else [*words, END]
        first = -0.3 - digest[17] / 1000 + self.shifts.get(model, 0.0)
        return [(token, first - 0.9 * rank) for rank, token in enumerate(candidates[:8])]

    def logprob(self, model: str, prefix: Sequence[int], token: int) -> float:
        ranked = dict(self.predict(model, prefix))
        return ranked.get(token, -12.0 - token % 7)

    def answer(
        self, model: str, prompt: Sequence[int], asked: str, request: Mapping[str, Any], sample: int
    ) -> Said:
        limit = request.get("max_completion_tokens") or request.get("max_tokens") or 16
        scripted = self.script(model, asked, sample) if self.script else None
        if scripted is not None:
            tokens = [*self.encode(scripted)[1:], END]
            cut = tokens[:limit]
            return Said(cut, "stop" if len(cut) == len(tokens) else "length")
        said: list[int] = []
        while len(said) < limit:
            ranked = self.predict(model, [*prompt, *said])
            chosen = 0
            if request.get("temperature", 1.0):
                draw = f"{request.get('seed')} {sample} {len(said)} {prompt}"
                chosen = hashlib.sha256(draw.encode()).digest()[0] % min(3, len(ranked))
            token = ranked[chosen][0]
            if token == END and request.get("ignore_eos"):
                token = next(other for other, _ in ranked if other != END)
            said.append(token)
            if token == END:
                return Said(said, "stop")
        return Said(said, "length")


@dataclass(frozen=True)
class Said:
    tokens: list[int]
    finish_reason: str


def text_of(content: Any) -> str:
    """Return a message's text, from either of its forms."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
