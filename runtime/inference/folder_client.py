"""Answer a client's requests from a folder of weights, in this process: no server runs.

The requests are those of vLLM's API that the clients send, and the answers have vLLM's form.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..clients.answers import CHAT, LIKELIEST
from ..clients.client import STATUS, Client, ServerError
from ..errors import UserError
from ..merging.journal import JOURNAL
from ..model.sampling import Sampling
from ..peft.peft_names import ADAPTER_CONFIG
from .loaded_model import LoadedModel, base_of, load_model, served_sampling, unsupported
from .text_generator import ROWS, Answer, Request, TextGenerator, TextStream

MODELS, HEALTH = "/v1/models", "/health"


class FolderClient(Client):
    """A client whose server is this process.

    Args:
        folder: of complete weights, or of a PEFT adapter.
        name: the name by which its model answers; None for the folder's.
        base: the name by which an adapter's base answers; None for not at all.

    Raises:
        UserError: when a model cannot be loaded.
    """

    local = True

    def __init__(self, folder: Path, name: str | None = None, base: str | None = None) -> None:
        if (folder / JOURNAL).exists():
            raise UserError(f"{folder} holds a merge that did not finish", "run merge.py again")
        self.url, self.timeout = str(folder), 0.0
        self._name, self._base = name or folder.resolve().name, base
        self._models = {self._name: _Served(load_model(folder))}
        if base is not None:
            self._models[base] = _Served(load_model(base_of(folder)))

    @property
    def about(self) -> str:
        """Return what answers, in words."""
        return self._models[self._name].model.where

    @property
    def has_key(self) -> bool:
        """Return False: there is no server that asks for a key."""
        return False

    def with_key(self, key: str) -> Client:
        """Return this client."""
        return self

    def within(self, timeout: float) -> Client:
        """Return this client, which waits for every answer."""
        return self

    def text(self, path: str) -> str:
        """Return "" for /health: the model is loaded."""
        if path != HEALTH:
            raise _refusal(self.url, path, 404, "there is no server")
        return ""

    def get(self, path: str) -> Any:
        """Return the list of models."""
        if path != MODELS:
            raise _refusal(self.url, path, 404, "there is no server")
        parents = {self._name: self._base}
        return {"data": [{"id": name, "parent": parents.get(name)} for name in self._models]}

    def version(self) -> None:
        """Return None: no vLLM answers."""
        return

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the answer to a request, in the form of vLLM's."""
        served, request = self._request(path, body)
        answer = served.answer(request)
        form = _Form(served.model, path == CHAT, body)
        choice = {"index": 0, **form.whole(answer), "logprobs": form.logprobs(answer)}
        choice |= {"finish_reason": _reason(answer), "token_ids": answer.tokens}
        out = {"model": body["model"], "choices": [choice], "usage": _usage(request, answer)}
        (out if form.chat else choice)["prompt_token_ids"] = list(request.prompt)
        return out

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the answer to a request as it is generated, in the form of vLLM's events."""
        served, request = self._request(path, body)
        form, text, told = _Form(served.model, path == CHAT, body), TextStream(served.model.tokenizer), 0
        answer = Answer()
        for answer in served.stream(request):
            new = answer.tokens[told:]
            choice = {"index": 0, **form.part(text.each(answer.tokens, told)), "token_ids": new}
            told = len(answer.tokens)
            yield {"choices": [{**choice, "finish_reason": _reason(answer) if answer.complete else None}]}
        yield {"choices": [], "usage": _usage(request, answer)}

    def _request(self, path: str, body: Mapping[str, Any]) -> tuple[_Served, Request]:
        """Return the model and the request that a body describes."""
        served = self._models.get(body["model"])
        if served is None:
            raise _refusal(self.url, path, 404, f"the model {body['model']} does not exist")
        model = served.model
        try:
            if path == CHAT:
                prompt = model.chat_tokens([_flat(message) for message in body["messages"]])
            elif isinstance(body["prompt"], str):
                prompt = list(model.tokenizer(body["prompt"])["input_ids"])
            else:
                prompt = list(body["prompt"])
            served.generator.room(prompt)
        except UserError as error:
            raise _refusal(self.url, path, 400, error.message) from error
        sampling = served_sampling(model.generation, float(body.get("temperature", 1.0)))
        ends = () if body.get("ignore_eos") else model.ends
        return served, Request(prompt, int(body["max_tokens"]), sampling, ends)


def open_folder(folder: Path, name: str | None, base: str | None) -> Client:
    """Return a client of a folder's model. It is loaded once for all clients of this process.

    Args:
        name, base: as for `FolderClient`; an adapter's base answers only if it is named.
    """
    key = (folder.resolve(), name, base if (folder / ADAPTER_CONFIG).is_file() else None)
    if key not in _clients:
        _clients[key] = FolderClient(folder, *key[1:])
    return _clients[key]


_clients: dict[tuple[Path, str | None, str | None], FolderClient] = {}


class _Served:
    """A loaded model, whose answers several threads request."""

    def __init__(self, model: LoadedModel) -> None:
        self.model, self.generator = model, TextGenerator(model, LIKELIEST)
        self._computing, self._waiting = threading.Lock(), list[_Waiting]()
        missing = unsupported(model.generation)
        if missing:
            names = f"{', '.join(missing)} of {model.folder}/generation_config.json"
            print(f"note: {names}: not applied, as on a server it would be", file=sys.stderr)

    def answer(self, request: Request) -> Answer:
        """Return an answer. Requests that wait at the same time are computed together."""
        mine = _Waiting(request)
        self._waiting.append(mine)
        with self._computing:
            if mine.answer is None:
                others = [w for w in self._waiting if w.together(mine)][: ROWS - 1]
                batch = [mine, *others]
                self._waiting = [w for w in self._waiting if w not in batch]
                answers = self.generator.answer([waiting.request for waiting in batch])
                for waiting, answer in zip(batch, answers, strict=True):
                    waiting.answer = answer
            assert mine.answer is not None
            return mine.answer

    def stream(self, request: Request) -> Iterator[Answer]:
        """Yield an answer as it is generated."""
        with self._computing:
            for (answer,) in self.generator.stream([request]):
                yield answer


@dataclass(eq=False)
class _Waiting:
    """A request of a thread, and its answer once it is computed."""

    request: Request
    answer: Answer | None = None

    def together(self, other: _Waiting) -> bool:
        """Return whether another request can be computed with this one."""
        same: Sampling = self.request.sampling
        return self is not other and same == other.request.sampling


@dataclass(frozen=True)
class _Form:
    """The form of the answers to a request.

    Attributes:
        chat: whether the request is a conversation.
        body: of the request.
    """

    model: LoadedModel
    chat: bool
    body: Mapping[str, Any]

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the text of an answer, without an incomplete character at its end, as vLLM does."""
        text = TextStream(self.model.tokenizer).each(answer.tokens)
        return {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}

    def part(self, text: str) -> dict[str, Any]:
        """Return a part of an answer's text, as a stream has it."""
        return {"delta": {"content": text}} if self.chat else {"text": text}

    def logprobs(self, answer: Answer) -> dict[str, Any] | None:
        """Return the log-probabilities that the request asks for, None for none."""
        wanted = self.body.get("top_logprobs" if self.chat else "logprobs")
        if not self.body.get("logprobs") or not wanted:
            return None
        steps = [dict(list(step.items())[: int(wanted)]) for step in answer.logps]
        if not self.chat:
            return {"top_logprobs": [{self._name(t): value for t, value in step.items()} for step in steps]}
        tops = ([{"token": self._name(t), "logprob": v} for t, v in step.items()] for step in steps)
        return {"content": [{"top_logprobs": top} for top in tops]}

    def _name(self, token: int) -> str:
        if self.body.get("return_tokens_as_token_ids"):
            return f"token_id:{token}"
        return str(self.model.tokenizer.decode([token]))


def _flat(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose content is a text, from one with parts of text."""
    content = message["content"]
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content)
    return {**message, "content": content}


def _reason(answer: Answer) -> str:
    return "stop" if answer.ended else "length"


def _usage(request: Request, answer: Answer) -> dict[str, int]:
    asked, written = len(request.prompt), len(answer.tokens)
    return {"prompt_tokens": asked, "completion_tokens": written, "total_tokens": asked + written}


def _refusal(url: str, path: str, status: int, reason: str) -> ServerError:
    return ServerError(f"{url}{path} answers {status}: {reason}", kind=STATUS, status=status)
