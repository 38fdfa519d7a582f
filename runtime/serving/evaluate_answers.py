"""A side of an evaluation, the base or the fine-tuned model: where it is served, and its answers on disk.

answers.jsonl has a line for each answer, with what it was asked with: a restart asks only what is missing,
and answers that were given under other settings are passed over. Failed requests are not kept: they are
asked again. side.json tells whether it is still the model that gave them.
"""

from __future__ import annotations

import fcntl
import json
import os
import queue
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..progress import Progress
from .client import NO_HOST, REFUSED, STATUS, Client, ServerError, pick
from .evaluate_prompts import Prompt

BASE, TUNED = "base", "tuned"
TITLES = {BASE: "base", TUNED: "fine-tuned"}

SAME_MODEL = 0.2
"""The largest difference of a log probability between two answers of one model: bfloat16 and other neighbors
in the batch account for a few hundredths."""

SAME_WEIGHTS = 1e-5
"""The same, where the base and the fine-tuned model are told apart."""

PROBE = "The capital of France is"


@dataclass(frozen=True)
class Side:
    """What is evaluated: a model, by the name that it is served by.

    Attributes:
        name: "base" or "tuned".
        url: where it is, or was, served.
        version: of vLLM.
        probe: log probabilities of the likeliest first tokens of an answer, by token; {} where the server
            does not tell.
        probed: the digest of the prompt that `probe` answers.
    """

    name: str
    model: str
    url: str
    version: str | None
    probe: Mapping[str, float]
    probed: str


def served_model(client: Client, wanted: str | None, flag: str) -> str:
    """The name to ask for.

    Args:
        wanted: the name that it should have; None takes the only one that is served.
        flag: that sets the name.

    Raises:
        UserError: when it is not served, or None and several are.
    """
    names = list(client.cards())
    if wanted is None and len(names) == 1:
        return names[0]
    listed = ", ".join(names) or "nothing"
    if wanted is None:
        raise UserError(f"{client.url} serves {listed}: which of them is meant?", f"{flag} NAME")
    if wanted not in names:
        raise UserError(
            f"{client.url} does not serve {wanted}, but {listed}",
            f"start the recipe's server there, or give the name with {flag}",
        )
    return wanted


def open_side(
    client: Client, name: str, model: str, first: Prompt | None, folder: Path, fresh: bool = False
) -> Side:
    """The side as it is served now; recorded in `folder`/side.json.

    Args:
        first: the prompt whose first token tells one model from another; None takes one of its own.
        folder: of the side's answers and results.
        fresh: throw away what is there.

    Raises:
        UserError: when what is there is of another model.
    """
    prompt = first or Prompt(0, None, PROBE, "", "probe")
    side = Side(name, model, client.url, client.version(), probe(client, model, prompt), prompt.digest)
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    before = recorded_side(folder)
    if before is not None:
        again = "--fresh throws it away and asks again; --results DIR keeps both"
        if before.model != model:
            raise UserError(f"{folder} holds the answers of {before.model}, not of {model}", again)
        if differ(before, side, SAME_MODEL):
            raise UserError(
                f"{folder} holds the answers of another model of the name {model}: its log probabilities "
                "were others",
                again,
            )
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / "side.json.part"
    temporary.write_text(json.dumps(asdict(side), indent=2) + "\n", encoding="utf-8")
    temporary.replace(folder / "side.json")
    return side


def recorded_side(folder: Path) -> Side | None:
    """The side as it was last asked; None where it never was."""
    try:
        return Side(**json.loads((folder / "side.json").read_text("utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def probe(client: Client, model: str, prompt: Prompt) -> dict[str, float]:
    """Log probabilities of the likeliest first tokens; {} from a server that does not tell them."""
    path, body = request(model, prompt, 0, SamplingSettings(max_tokens=1))
    body |= {"logprobs": 5} if prompt.messages is None else {"logprobs": True, "top_logprobs": 5}
    try:
        choice: Any = pick(client.post(path, body), path, "choices", 0, kind=dict)
        if prompt.messages is None:
            return dict(choice["logprobs"]["top_logprobs"][0])
        return {
            token["token"]: token["logprob"] for token in choice["logprobs"]["content"][0]["top_logprobs"]
        }
    except ServerError as error:
        # The prompts themselves will say what is wrong.
        if error.kind == STATUS and error.status not in (401, 403, 404):
            return {}
        raise
    except (LookupError, TypeError, ValueError):
        return {}


def differ(one: Side, other: Side, tolerance: float) -> bool:
    """Whether two probes are of different models; False where that cannot be told."""
    if not one.probe or not other.probe or one.probed != other.probed:
        return False
    shared = one.probe.keys() & other.probe.keys()
    # The last of five may change places with a sixth.
    if len(shared) < min(len(one.probe), len(other.probe)) - 2:
        return True
    return any(abs(one.probe[token] - other.probe[token]) > tolerance for token in shared)


def same_weights(one: Side, other: Side) -> bool:
    """Whether two probes are as of one and the same model."""
    comparable = bool(one.probe) and one.probed == other.probed
    return comparable and one.probe.keys() == other.probe.keys() and not differ(one, other, SAME_WEIGHTS)


ATTEMPTS = 3
"""Of a request whose failure may pass: a busy server, a broken connection."""

PAUSE = 1.0
"""Seconds before the second attempt, and twice that before the third."""

HOPELESS = (401, 403, 404)
"""Statuses that every further request would get too."""


@dataclass(frozen=True)
class SamplingSettings:
    """How answers are drawn.

    Attributes:
        samples: answers to each prompt.
        max_tokens: of an answer.
        seed: of a prompt's first sample, the next one's is one more; None sends none, because vLLM refuses
            requests with a seed on TPUs.
    """

    samples: int = 1
    temperature: float = 0.0
    max_tokens: int = 512
    seed: int | None = None

    def drawn(self) -> dict[str, Any]:
        """What an answer depends on: all but how many there are."""
        values = asdict(self)
        del values["samples"]
        return values


@dataclass(frozen=True)
class Answer:
    """What a model said to a prompt.

    Attributes:
        prompt: its digest.
        sample: its number, counted from 0.
        cut: whether it was ended by `max_tokens`.
        tokens: of the answer, where the server tells.
    """

    prompt: str
    sample: int
    text: str
    cut: bool = False
    tokens: int | None = None


@dataclass
class SideAnswers:
    """What is known of a side.

    Attributes:
        found: answers by prompt and sample, under the settings asked for.
        others: how many answers are recorded under other settings.
        failures: what was said for each request that failed, by prompt and sample.
        before: how many of `found` are of an earlier run.
    """

    found: dict[tuple[str, int], Answer] = field(default_factory=dict)
    others: int = 0
    failures: dict[tuple[str, int], str] = field(default_factory=dict)
    before: int = 0

    def of(self, prompt: Prompt, settings: SamplingSettings) -> list[Answer]:
        """A prompt's answers, in the order of its samples."""
        keys = ((prompt.digest, sample) for sample in range(settings.samples))
        return [self.found[key] for key in keys if key in self.found]


def recorded(path: Path, settings: SamplingSettings) -> SideAnswers:
    """The answers of a file; none when there is no file. A line that was cut off is passed over."""
    answers = SideAnswers()
    if not path.is_file():
        return answers
    for line in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
            drawn = {name: row[name] for name in settings.drawn()}
            answer = Answer(row["prompt"], row["sample"], row["text"], row["cut"], row["tokens"])
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if drawn != settings.drawn():
            answers.others += 1
        elif answer.sample < settings.samples:
            answers.found[answer.prompt, answer.sample] = answer
    answers.before = len(answers.found)
    return answers


def ask(
    client: Client,
    model: str,
    prompts: Sequence[Prompt],
    settings: SamplingSettings,
    path: Path,
    at_once: int = 16,
    label: str = "asking",
) -> SideAnswers:
    """All answers to the prompts: those of `path`, and the missing ones, which are added to it.

    Args:
        model: the name that it is served by.
        path: answers.jsonl.
        at_once: requests in flight.

    Raises:
        UserError: when another run writes to `path`.
        ServerError: when the server is gone, or would refuse every request; what it answered is kept.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _journal(path) as write:
        answers = recorded(path, settings)
        wanted = [
            (prompt, sample)
            for sample in range(settings.samples)
            for prompt in prompts
            if (prompt.digest, sample) not in answers.found
        ]
        with Progress(label, len(wanted)) as progress:
            for prompt, sample, outcome in _all(client, model, wanted, settings, at_once):
                if isinstance(outcome, Answer):
                    write({**asdict(outcome), "line": prompt.line, **settings.drawn()})
                    answers.found[prompt.digest, sample] = outcome
                elif _is_final(outcome):
                    count = len(answers.found)
                    kept = f"{count} of {len(prompts) * settings.samples} answers are in {path}"
                    help = f"{outcome.help}; {kept}" if outcome.help else kept
                    raise ServerError(
                        outcome.message,
                        f"{help}: run again to go on",
                        kind=outcome.kind,
                        status=outcome.status,
                    )
                else:
                    answers.failures[prompt.digest, sample] = outcome.message
                progress.advance(1)
    return answers


def request(
    model: str, prompt: Prompt, sample: int, settings: SamplingSettings
) -> tuple[str, dict[str, Any]]:
    """Path and body of the request for one answer."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
    }
    if settings.seed is not None:
        body["seed"] = settings.seed + sample
    if prompt.messages is None:
        return "/v1/completions", {**body, "prompt": prompt.text}
    return "/v1/chat/completions", {**body, "messages": prompt.messages}


def _all(
    client: Client, model: str, wanted: Sequence[tuple[Prompt, int]], settings: SamplingSettings, at_once: int
) -> Iterator[tuple[Prompt, int, Answer | ServerError]]:
    """Asks all, in threads that do not outlive the main one; outcomes as they come."""
    waiting: queue.SimpleQueue[tuple[Prompt, int]] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[Prompt, int, Answer | ServerError | BaseException]] = queue.SimpleQueue()
    for item in wanted:
        waiting.put(item)
    stopped = threading.Event()

    def work() -> None:
        while not stopped.is_set():
            try:
                prompt, sample = waiting.get_nowait()
            except queue.Empty:
                return
            outcome: Answer | ServerError | BaseException
            try:
                outcome = _one(client, model, prompt, sample, settings, stopped)
            except ServerError as error:
                outcome = error
            except BaseException as error:
                outcome = error
            done.put((prompt, sample, outcome))

    for _ in range(min(at_once, len(wanted))):
        threading.Thread(target=work, daemon=True).start()
    try:
        for _ in wanted:
            prompt, sample, outcome = done.get()
            if not isinstance(outcome, Answer | ServerError):
                raise outcome
            yield prompt, sample, outcome
    finally:
        stopped.set()


def _one(
    client: Client,
    model: str,
    prompt: Prompt,
    sample: int,
    settings: SamplingSettings,
    stopped: threading.Event,
) -> Answer:
    path, body = request(model, prompt, sample, settings)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return _answer(prompt, sample, client.post(path, body), path)
        except ServerError as error:
            passing = error.kind != STATUS or error.status == 429 or (error.status or 0) >= 500
            if attempt == ATTEMPTS or not passing or stopped.is_set():
                raise
        time.sleep(PAUSE * attempt)
    raise AssertionError("not reached")


def _answer(prompt: Prompt, sample: int, body: Any, path: str) -> Answer:
    choice = pick(body, path, "choices", 0, kind=dict)
    if prompt.messages is None:
        text = pick(choice, path, "text", kind=str)
    else:
        # None where the model called a tool in place of an answer.
        text = pick(choice, path, "message", "content", kind=(str, type(None))) or ""
    usage = body.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return Answer(prompt.digest, sample, text, choice.get("finish_reason") == "length", tokens)


def _is_final(error: ServerError) -> bool:
    return error.kind in (REFUSED, NO_HOST) or error.status in HOPELESS


@contextmanager
def _journal(path: Path) -> Iterator[Any]:
    """A function that adds a line to the file, whole or not at all; for one run at a time."""
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"another run writes to {path}", "wait for it, or give this one another --results"
            ) from None
        end = os.lseek(handle, 0, os.SEEK_END)
        if end and os.pread(handle, 1, end - 1) != b"\n":
            os.write(handle, b"\n")  # after a line that was cut off

        def write(row: Mapping[str, Any]) -> None:
            # ASCII: an answer may hold half of a surrogate pair, which is no UTF-8.
            os.write(handle, json.dumps(row).encode() + b"\n")

        yield write
    finally:
        os.close(handle)
