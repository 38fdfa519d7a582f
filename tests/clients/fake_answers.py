"""The fake vLLM's JSON: whole answers and a stream's events, of chats and of completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tests.clients.fake_language import VOCABULARY, WORDS, text_of

if TYPE_CHECKING:
    from tests.clients.fake_vllm import FakeVllm


class Answers:
    """The answers to one request, in the format of its path."""

    def __init__(self, fake: FakeVllm, model: str, body: Mapping[str, Any], path: str) -> None:
        self.fake, self.model, self.body = fake, model, body
        self.language = fake.language
        self.fingerprint = f"vllm-{fake.version}-0"
        self.chat = path.endswith("/chat/completions")
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex[:16]}"
        self.prompt, text = self._prompt()
        self.said = self.language.answer(model, self.prompt, text, body, 0)
        counts = len(self.prompt), len(self.said.tokens)
        self.usage = {"prompt_tokens": counts[0], "total_tokens": sum(counts), "completion_tokens": counts[1]}
        with fake.lock:
            fake.tokens["prompt"] += self.usage["prompt_tokens"]
            fake.tokens["generation"] += self.usage["completion_tokens"]

    def _prompt(self) -> tuple[list[int], str]:
        """Return the token ids of the prompt, and its text."""
        if self.chat:
            messages = self.body["messages"]
            return self.language.encode_chat(messages), text_of(messages[-1]["content"])
        prompt = self.body["prompt"]
        if isinstance(prompt, str):
            return self.language.encode(prompt), prompt
        return list(prompt), self.language.decode(prompt)

    def whole(self) -> dict[str, Any]:
        answer = {
            "id": self.id,
            "object": "chat.completion" if self.chat else "text_completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": [self._choice()],
            "service_tier": None,
            "system_fingerprint": self.fingerprint,
            "usage": {**self.usage, "prompt_tokens_details": None, "completion_tokens_details": None},
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
        if self.fake.faults.no_usage:
            del answer["usage"]
        if self.chat:
            answer["prompt_logprobs"] = None
            answer["prompt_token_ids"] = self.prompt if self.body.get("return_token_ids") else None
            answer["prompt_text"] = None
        return answer

    def _choice(self) -> dict[str, Any]:
        said, prompt = self.said, self.prompt
        ids = self.body.get("return_token_ids")
        choice: dict[str, Any] = {"index": 0}
        if self.chat:
            choice["message"] = {
                "role": "assistant",
                "content": self.language.decode(said.tokens),
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            }
            choice["logprobs"] = self._chat_logprobs(prompt, said.tokens)
        else:
            choice["text"] = self.language.decode(said.tokens)
            choice["logprobs"] = self._logprobs([*prompt, *said.tokens], len(prompt))
        choice |= {"finish_reason": said.finish_reason, "stop_reason": None}
        choice["token_ids"] = said.tokens if ids else None
        if not self.chat:
            choice["prompt_logprobs"] = None
            choice["prompt_token_ids"] = prompt if ids else None
        return choice | {"routed_experts": None}

    def events(self) -> list[dict[str, Any]]:
        """Return every event of a stream: one for each token, after one for a chat's role."""
        common = {
            "id": self.id,
            "object": "chat.completion.chunk" if self.chat else "text_completion",
            "created": int(time.time()),
            "model": self.model,
        }
        ids = self.body.get("return_token_ids")
        usage = (self.body.get("stream_options") or {}).get("include_usage") and not self.fake.faults.no_usage
        out: list[dict[str, Any]] = []
        if self.chat:
            delta = {"role": "assistant", "content": ""}
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
            first = {"prompt_token_ids": self.prompt if ids else None, "prompt_text": None}
            out.append({**common, "choices": [choice], **first})
        offset = 0
        for number in range(len(self.said.tokens)):
            choice = self._delta(number)
            if choice["logprobs"] and not self.chat:
                choice["logprobs"]["text_offset"] = [offset]
                offset += len(choice["logprobs"]["tokens"][0])
            event = {**common, "choices": [choice]}
            if choice["finish_reason"] and not usage:
                event["system_fingerprint"] = self.fingerprint
            out.append(event)
        if usage:
            last = {"choices": [], "usage": self.usage, "system_fingerprint": self.fingerprint}
            out.append({**common, **last})
        return out

    def _delta(self, number: int) -> dict[str, Any]:
        """Return the choice in the event of one token."""
        said, prompt = self.said, self.prompt
        token, wobble = said.tokens[number], self.fake.faults.wobble
        spoken = token
        if wobble is not None and number >= wobble:
            spoken = WORDS + (token + 1 - WORDS) % len(VOCABULARY)
        text = self.language.decode([spoken])
        before = [*prompt, *said.tokens[:number]]
        end = said.finish_reason if number == len(said.tokens) - 1 else None
        ids = [spoken] if self.body.get("return_token_ids") else None
        if self.chat:
            choice: dict[str, Any] = {"index": 0, "delta": {"content": text}}
            choice |= {"logprobs": self._chat_logprobs(before, [token]), "finish_reason": end}
            return choice | ({"stop_reason": None} if end else {}) | {"token_ids": ids}
        choice = {"index": 0, "text": text, "logprobs": self._logprobs([*before, token], len(before))}
        choice |= {"finish_reason": end, "stop_reason": None}
        choice["prompt_token_ids"] = prompt if ids and number == 0 else None
        return choice | {"token_ids": ids}

    def _name(self, token: int) -> str:
        return (
            f"token_id:{token}"
            if self.body.get("return_tokens_as_token_ids")
            else self.language.decode([token])
        )

    def _logprobs(self, tokens: Sequence[int], start: int) -> dict[str, Any] | None:
        """Return a completion's log probabilities from the token `start` on."""
        count = self.body.get("logprobs")
        if count is None:
            return None
        names, own, tops, offsets, offset = [], [], [], [], 0
        for place in range(start, len(tokens)):
            token, name = tokens[place], self._name(tokens[place])
            names.append(name)
            offsets.append(offset)
            offset += len(name)
            logprob = self.language.logprob(self.model, tokens[:place], token)
            ranked = self.language.predict(self.model, tokens[:place])[:count]
            own.append(logprob)
            tops.append({name: logprob, **{self._name(other): value for other, value in ranked}})
        return {"text_offset": offsets, "token_logprobs": own, "tokens": names, "top_logprobs": tops}

    def _chat_logprobs(self, prompt: Sequence[int], said: Sequence[int]) -> dict[str, Any] | None:
        if not self.body.get("logprobs"):
            return None
        content = []
        for number, token in enumerate(said):
            before = [*prompt, *said[:number]]
            ranked = self.language.predict(self.model, before)[: self.body.get("top_logprobs") or 0]
            content.append(
                {
                    **self._chat_logprob(token, self.language.logprob(self.model, before, token)),
                    "top_logprobs": [self._chat_logprob(other, value) for other, value in ranked],
                }
            )
        return {"content": content}

    def _chat_logprob(self, token: int, logprob: float) -> dict[str, Any]:
        name = self._name(token)
        return {"token": name, "logprob": logprob, "bytes": list(name.encode())}
