"""`recipe serve verify`: whether an endpoint serves the intended checkpoint.

The endpoint answers prompts of different lengths greedily, with token ids and log probabilities.
verify_reference.py computes the checkpoint's log probabilities in transformers, and this module compares the
two. The effect of rounding is measured, not assumed: the checkpoint is computed a second time in the server's
types. The server's distance from float32 may be `FACTOR` times the distance of that second computation.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipec.compiler.deployment import verify_reference
from recipec.compiler.deployment.served_artifact import open_artifact
from recipec.compiler.deployment.verify_reference import (
    Reference,
    ReferenceTokenizer,
    ServedTypes,
    config_dtype,
)
from recipec.compiler.lowering.references import asks_chats
from recipec.compiler.pages.document import Document, Table, Text, sheet
from recipec.compiler.terminal import each, note
from recipec.compiler.vllm.flags import by_flag
from recipec.runtime.clients.client import STATUS, Client, ServerError, pick, served_model
from recipec.runtime.clients.evaluate_prompts import parse
from recipec.runtime.errors import UserError

if TYPE_CHECKING:
    from recipec.spec.language import Recipe


LONGEST = 1200
"""Most tokens of the long prompt; with more, a 31B model takes minutes on a CPU."""

LONG = 257
"""Tokens of the long prompt if every layer sees the whole context."""


@dataclass(frozen=True)
class VerifyOptions:
    """The arguments of `recipe serve verify`, by name."""

    url: str
    artifact: Path | None = None
    model: Path | None = None
    name: str | None = None
    prompts: Path | None = None
    tokens: int = 16
    tolerance: float | None = None
    dtype: str = "float32"
    server_dtype: str | None = None


def verify(asked: VerifyOptions) -> dict[str, Any]:
    """Compare an endpoint with a checkpoint.

    Returns:
        Plain data, as --json prints it; "problems" is empty if the endpoint serves the checkpoint.

    Raises:
        UserError, ArtifactError: when no comparison is possible.
    """
    client = Client(asked.url, timeout=600.0)
    recipe = _recipe(asked.artifact) if asked.artifact is not None else None
    folder = asked.model or _merged(asked.artifact, recipe)
    config = verify_reference.read_config(folder)
    served = served_model(client, asked.name or (recipe.name if recipe else None), "--name")
    lengths = [card.get("max_model_len") for card in client.cards().values()]
    longest = min((length for length in lengths if isinstance(length, int)), default=None)
    types = served_types(recipe, config, asked.server_dtype)
    verify_reference.torch()
    verify_reference.refuse_too_large(folder, asked.dtype)
    tokenizer = verify_reference.ReferenceTokenizer(folder)
    span = verify_reference.local_span(config)
    cases = _built_in(_long_repeats(tokenizer, span, longest, asked.tokens), tokenizer.has_template)
    cases += _own(asked.prompts, recipe, tokenizer) if asked.prompts else []
    room = None if longest is None else longest - asked.tokens
    sizes = {number: len(_ids(case, tokenizer)) for number, case in enumerate(cases)}
    sizes = {number: size for number, size in sizes.items() if room is None or size <= room}
    cases = [cases[number] for number in sizes]
    asked_for = max(sizes.values(), default=0)
    if span is not None and asked_for <= span:
        note(
            f"note: local layers see {span:,} tokens, and no prompt is longer than {asked_for:,}, so "
            "longer ones are not compared; --prompts FILE adds longer ones"
        )
    replies, refused = _replies(client, served, cases, asked.tokens)
    note(f"{asked.url}: {len(replies)} prompts answered; loading {folder} in {asked.dtype}")
    reference = verify_reference.Reference(folder, config, asked.dtype)
    compared = _compare(replies, tokenizer, reference, types, asked.dtype)
    allowed = allowance(compared, types, asked.dtype, asked.tolerance)
    values = [value for prompt in compared for step in prompt.steps for value in step.differences]
    return {
        "url": client.url,
        "model": served,
        "checkpoint": str(folder),
        "reference": f"transformers in {asked.dtype}",
        "server": {"types": str(types), "source": types.source, "vllm": client.version()},
        "tolerance": {
            "largest": allowed.largest,
            "mean": None if allowed.mean == float("inf") else allowed.mean,
            "source": allowed.source,
        },
        "largest": max(values, default=None),
        "mean": sum(values) / len(values) if values else None,
        "prompts": [_row(prompt, allowed) for prompt in compared],
        "problems": [*refused, *problems(compared, allowed, tokenizer)],
    }


def document(result: dict[str, Any]) -> Document:
    """Return the result as a document: a table of prompts, and the verdict."""
    rows = []
    for row in result["prompts"]:
        same = "yes" if row["parts_at"] is None else f"no, from token {row['parts_at']}"
        if row["parts_at"] is None and row["ties"]:
            same = f"yes, {row['ties']} ties" if row["ties"] > 1 else "yes, a tie"
        rows.append(
            (
                _printable(row["prompt"]),
                row["kind"],
                f"{row['prompt_tokens']} + {row['tokens']}",
                "yes" if row["same_prompt"] else "no",
                same,
                f"{row['largest']:.2g}",
                f"{row['mean']:.2g}",
            )
        )
    head = ("prompt", "kind", "tokens", "same prompt", "same answer", "largest", "mean")
    table = Table(head, rows, words=(1, 3, 4))
    allowed, server = result["tolerance"], result["server"]
    mean = "" if allowed["mean"] is None else f", mean {allowed['mean']:.2g}"
    lines = [
        f"server: {result['model']} at {result['url']}, {server['types']} ({server['source']})",
        f"reference: {result['reference']} on {result['checkpoint']}",
        f"allowed: largest {allowed['largest']:.2g}{mean}: {allowed['source']}",
    ]
    if result["largest"] is not None:
        lines.append(f"found: largest {result['largest']:.2g}, mean {result['mean']:.2g}")
    lines += [f"problem: {problem}" for problem in result["problems"]]
    verdict = "the endpoint is not this checkpoint" if result["problems"] else "the same model"
    lines.append(f"verdict: {verdict}")
    return sheet("", [table], [Text(line) for line in lines])


def served_types(recipe: Recipe | None, config: dict[str, Any], option: str | None) -> ServedTypes:
    """Return the types that the server computes in, from the option, the recipe's flags or the checkpoint."""
    serve = recipe.serve if recipe else None
    if option is not None:
        return ServedTypes(option, source="--server-dtype")
    flags = by_flag(serve.extra_args) if serve else {}
    dtype, source = str(flags.get("dtype", "auto")), "the recipe's flags"
    if dtype in ("auto", "half", "float"):
        named = {"half": "float16", "float": "float32"}.get(dtype)
        dtype = named or _automatic(config_dtype(config))
        source = "the recipe's flags" if named else "vLLM's choice for the checkpoint's dtype"
    if serve is None:
        return ServedTypes(dtype, source=source)
    return ServedTypes(dtype, serve.kv_cache_dtype, serve.quantization, "the recipe's flags")


def _automatic(dtype: str) -> str:
    """Return the type of vLLM's --dtype auto: the checkpoint's own, or 16 bits for one in float32."""
    return "bfloat16" if dtype == "float32" else dtype


def _recipe(artifact: Path) -> Recipe:
    opened = open_artifact(artifact)
    for line in opened.notes:
        note(f"note: {line}")
    return opened.recipe


def _merged(artifact: Path | None, recipe: Recipe | None) -> Path:
    """Return the folder in which merge.py writes the merged weights."""
    assert artifact is not None and recipe is not None
    output = recipe.merge.output
    if "://" in output:
        raise UserError(
            f"the merged weights are at {output}", "copy them here, and name the folder: --model DIR"
        )
    return artifact / output


def _long_repeats(tokenizer: ReferenceTokenizer, span: int | None, longest: int | None, tokens: int) -> int:
    """Return how often the long prompt repeats its sentence, to exceed local layers' span if possible."""
    wanted = min(LONGEST, LONG if span is None else span + 57)
    if longest is not None:
        wanted = min(wanted, longest - tokens - 16)
    sentence_tokens = max(1, len(tokenizer.of_text(SENTENCE * 2)) - len(tokenizer.of_text(SENTENCE)))
    return max(0, wanted // sentence_tokens + (span is not None and span + 57 <= wanted))


def _own(path: Path, recipe: Recipe | None, tokenizer: ReferenceTokenizer) -> list[VerifyPrompt]:
    chat = tokenizer.has_template and (recipe is None or asks_chats(recipe))
    prompts, faults = parse(path, chat, expected=False)
    if faults:
        place = str(path) if faults[0].line is None else f"{path}:{faults[0].line}"
        raise UserError(f"{place}: {faults[0].message}", faults[0].help)
    return [VerifyPrompt(prompt.title, prompt.text, prompt.messages) for prompt in prompts]


def _ids(case: VerifyPrompt, tokenizer: ReferenceTokenizer) -> Sequence[int]:
    return tokenizer.of_text(case.text or "") if case.messages is None else tokenizer.of_chat(case.messages)


def _replies(
    client: Client, served: str, cases: Sequence[VerifyPrompt], tokens: int
) -> tuple[list[Reply], list[str]]:
    """Return the endpoint's answers, and a sentence if it refuses a chat although there is a template."""
    replies, refused = [], []
    for case in each("asking the endpoint", cases):
        try:
            replies.append(_ask(client, served, case, tokens))
        except ServerError as error:
            if error.status != 400 or case.kind != "chat":
                raise
            refused.append(f"the server has another chat template: it refuses a chat: {error.message}")
    return replies, refused[:1]


def _printable(text: str) -> str:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


ALTERNATIVES = 5
"""Log probabilities requested at each step; by default vLLM returns at most 20."""

TEXTS = (
    "Paris",
    "The opposite of hot is",
    "Water boils at one hundred degrees, and",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    # Text that tokenizers split differently.
    "Größe, façade, Ελλάδα, 東京, 🌍 and 3,141.59;\tthe next",
)

CHATS: tuple[tuple[str, ...], ...] = (
    ("What is the capital of France?",),
    ("Write one line about rain.\n\nNo rhymes.",),
    ("My name is Ada.", "Hello Ada!", "What is my name?"),
)
"""Turns of user and assistant."""

SENTENCE = (
    "Once upon a time there was a baker who kneaded the dough, waited an hour, shaped twelve loaves and lit "
    "her oven; and each morning, when the bells rang, the whole street came to her door. "
)
"""Sentence that is repeated to make a prompt longer than a sliding window."""


@dataclass(frozen=True)
class VerifyPrompt:
    """A prompt: `text` to continue, or the `messages` of a chat."""

    title: str
    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None

    @property
    def kind(self) -> str:
        return "text" if self.messages is None else "chat"


@dataclass(frozen=True)
class Reply:
    """The endpoint's answer.

    Attributes:
        prompt: token ids, as the server's tokenizer and template produced them.
        tokens: token ids of the answer.
        top: at each step, the log probabilities of the likeliest tokens.
    """

    case: VerifyPrompt
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    top: tuple[Mapping[int, float], ...]


def _built_in(long_repeats: int, chat: bool) -> list[VerifyPrompt]:
    """Return the prompts that every endpoint gets.

    Args:
        long_repeats: how often the long prompt repeats its sentence; 0 leaves the prompt out.
        chat: whether the tokenizer has a template.
    """
    cases = [VerifyPrompt(_title(text), text) for text in TEXTS]
    if long_repeats:
        cases.append(VerifyPrompt(f"a long text: {_title(SENTENCE)}", SENTENCE * long_repeats + "One day"))
    if chat:
        for turns in CHATS:
            roles = ("user", "assistant")
            messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
            cases.append(VerifyPrompt(_title(turns[-1]), messages=messages))
    return cases


def _title(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 40 else f"{words[:37]}..."


def _ask(client: Client, model: str, case: VerifyPrompt, tokens: int) -> Reply:
    """Return the endpoint's greedy answer.

    Args:
        tokens: most tokens of the answer.

    Raises:
        UserError: when it does not answer, or returns no token ids.
    """
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": tokens,
        "temperature": 0,
        # generation_config.json may set another value, and vLLM reads that file.
        "repetition_penalty": 1.0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if case.messages is None:
        path = "/v1/completions"
        body |= {"prompt": case.text, "logprobs": ALTERNATIVES}
    else:
        path = "/v1/chat/completions"
        body |= {"messages": case.messages, "logprobs": True, "top_logprobs": ALTERNATIVES}
    answer = client.post(path, body)
    choice = pick(answer, path, "choices", 0, kind=dict)
    prompt = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
    if not isinstance(prompt, list) or not isinstance(choice.get("token_ids"), list):
        raise UserError(
            f"{client.url} returns no token ids: answers can be compared only with vLLM 0.10.2 or later",
            "serve it with the recipe's image",
        )
    ids = pick(choice, path, "token_ids", kind=list)
    try:
        top = _top(choice, case)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise ServerError(
            f"{path} answers without proper log probabilities", kind=STATUS, status=200
        ) from None
    if len(top) != len(ids):
        raise ServerError(
            f"{path} tells log probabilities of {len(top)} of {len(ids)} tokens", kind=STATUS, status=200
        )
    return Reply(case, tuple(prompt), tuple(ids), top)


def _top(choice: Mapping[str, Any], case: VerifyPrompt) -> tuple[Mapping[int, float], ...]:
    logprobs = choice["logprobs"]
    if case.messages is None:
        steps = [list(step.items()) for step in logprobs["top_logprobs"]]
    else:
        steps = [
            [(top["token"], top["logprob"]) for top in step["top_logprobs"]] for step in logprobs["content"]
        ]
    return tuple(
        {
            int(token.removeprefix("token_id:")): float(value)
            for token, value in step
            # -9999 means a probability of 0.
            if math.isfinite(value) and value > -9000
        }
        for step in steps
    )


FACTOR = 3.0
"""Allowed ratio between the rounding of two programs in the same types: order of sums, kernels, batches."""

LARGEST, MEAN = 1e-3, 2.5e-4
"""Tolerances of log probabilities in float32; no tolerance is smaller. vLLM on a CPU was within 2.4e-4."""

ROUNDING = {"bfloat16": (0.12, 0.038), "fp8 keys and values": (0.74, 0.072), "fp8 weights": (1.5, 0.17)}
"""Largest and mean effect of rounding on log probabilities, as seen on Gemma 3 270M in transformers; each
type includes those before it. For a reference in bfloat16 itself, whose rounding cannot be measured."""


@dataclass(frozen=True)
class Tolerance:
    """Allowed differences of log probabilities; `source` says how they were determined."""

    largest: float
    mean: float
    source: str


@dataclass(frozen=True)
class ComparedToken:
    """One token of an answer.

    Attributes:
        token, best: the endpoint's token, and the reference's likeliest.
        margin: how much likelier `best` is in the reference, as a difference of log probabilities.
        greedy: whether the endpoint chose the token it considered likeliest.
        told: the endpoint's log probabilities of the tokens it considered likeliest.
        exact, rounded: the same tokens' log probabilities in the reference, and in the reference in the
            server's types.
    """

    token: int
    best: int
    margin: float
    greedy: bool
    told: tuple[float, ...]
    exact: tuple[float, ...]
    rounded: tuple[float, ...] = ()

    @property
    def differences(self) -> list[float]:
        return [abs(a - b) for a, b in zip(self.told, self.exact, strict=True)]

    @property
    def rounding(self) -> list[float]:
        return [abs(a - b) for a, b in zip(self.rounded, self.exact, strict=False)]


@dataclass(frozen=True)
class ComparedPrompt:
    """One prompt, compared.

    Attributes:
        wanted: the prompt as the checkpoint tokenizes it.
        steps: () if the answer is empty or has tokens beyond the checkpoint's vocabulary.
        foreign: a token beyond the checkpoint's vocabulary.
    """

    reply: Reply
    wanted: tuple[int, ...]
    steps: tuple[ComparedToken, ...]
    foreign: int | None = None

    @property
    def same_prompt(self) -> bool:
        return self.wanted == self.reply.prompt

    @property
    def largest(self) -> float:
        return max((value for step in self.steps for value in step.differences), default=0.0)

    @property
    def mean(self) -> float:
        return _mean([value for step in self.steps for value in step.differences])

    def parted(self, tie: float) -> int | None:
        """Return the first step whose token the reference rates below its likeliest by more than `tie`."""
        return next((i for i, step in enumerate(self.steps) if step.margin > tie), None)

    def ties(self, tie: float) -> int:
        """Count the steps where the two choose different but equally likely tokens."""
        return sum(step.token != step.best and step.margin <= tie for step in self.steps)


def _compare(
    replies: Sequence[Reply], tokens: ReferenceTokenizer, reference: Reference, types: ServedTypes, dtype: str
) -> list[ComparedPrompt]:
    """Compare every reply with the checkpoint. May leave the reference's model in the server's types.

    Args:
        dtype: the type that the reference was loaded in.
    """
    compared = [
        _compare_one(reply, tokens, reference) for reply in each("computing the answers here", replies)
    ]
    if dtype != "float32" or str(types) == "float32":
        return compared
    reference.lower(types)
    return [_rounded(prompt, reference, types) for prompt in each(f"computing them in {types}", compared)]


def _compare_one(reply: Reply, tokens: ReferenceTokenizer, reference: Reference) -> ComparedPrompt:
    case = reply.case
    wanted = tokens.of_chat(case.messages) if case.messages is not None else tokens.of_text(case.text or "")
    beyond = [
        token
        for token in (*reply.prompt, *reply.tokens, *(token for step in reply.top for token in step))
        if not 0 <= token < reference.vocabulary
    ]
    if beyond or not reply.tokens or not reply.prompt:
        return ComparedPrompt(reply, wanted, (), beyond[0] if beyond else None)
    logprobs = reference.logprobs(reply.prompt, reply.tokens)
    steps = []
    for at, token, top in zip(logprobs, reply.tokens, reply.top, strict=True):
        best = int(at.argmax())
        greedy = bool(top) and top.get(token, float("-inf")) >= max(top.values()) - 1e-6
        exact = tuple(float(at[other]) for other in top)
        steps.append(
            ComparedToken(token, best, float(at[best] - at[token]), greedy, tuple(top.values()), exact)
        )
    return ComparedPrompt(reply, wanted, tuple(steps))


def _rounded(prompt: ComparedPrompt, reference: Reference, types: ServedTypes) -> ComparedPrompt:
    """Return the prompt with log probabilities of the reference in the server's types added."""
    if not prompt.steps:
        return prompt
    logprobs = reference.logprobs(prompt.reply.prompt, prompt.reply.tokens, types.kv_cache)
    steps = [
        replace(step, rounded=tuple(float(at[token]) for token in top))
        for step, top, at in zip(prompt.steps, prompt.reply.top, logprobs, strict=True)
    ]
    return replace(prompt, steps=tuple(steps))


def allowance(
    compared: Sequence[ComparedPrompt], types: ServedTypes, dtype: str, tolerance: float | None
) -> Tolerance:
    """Return the allowed differences.

    Args:
        tolerance: the largest difference that the user allows.
    """
    if tolerance is not None:
        return Tolerance(tolerance, float("inf"), "given by --tolerance; the mean is not judged")
    if dtype != "float32":
        kind = (
            "fp8 weights"
            if types.weights
            else "fp8 keys and values"
            if "fp8" in types.kv_cache
            else "bfloat16"
        )
        largest, mean = ROUNDING[kind]
        return Tolerance(
            FACTOR * largest,
            FACTOR * mean,
            f"{FACTOR:g} times what was seen on Gemma 3 270M, because the reference is in {dtype} itself: "
            "--dtype float32 measures it",
        )
    rounding = [value for prompt in compared for step in prompt.steps for value in step.rounding]
    if not rounding:
        return Tolerance(LARGEST, MEAN, "the server computes in float32")
    largest, mean = max(rounding), _mean(rounding)
    return Tolerance(
        max(LARGEST, FACTOR * largest),
        max(MEAN, FACTOR * mean),
        f"{FACTOR:g} times what rounding to {types} makes of these answers in transformers (largest "
        f"{largest:.2g}, mean {mean:.2g})",
    )


def problems(compared: Sequence[ComparedPrompt], allowed: Tolerance, tokens: ReferenceTokenizer) -> list[str]:
    """Return why the answers are not the checkpoint's, one sentence each; [] if they are."""
    return [*_prompt_problems(compared, tokens), *_answer_problems(compared, allowed)]


def _prompt_problems(compared: Sequence[ComparedPrompt], tokens: ReferenceTokenizer) -> list[str]:
    """Report a different tokenizer or chat template; if the tokenizer differs, do not report the template."""
    for kind, what in (("text", "tokenizer"), ("chat", "chat template")):
        of_kind = [prompt for prompt in compared if prompt.reply.case.kind == kind]
        other = [prompt for prompt in of_kind if not prompt.same_prompt]
        if not other:
            continue
        first = other[0]
        theirs, ours = first.reply.prompt, first.wanted
        at = next(
            (i for i, pair in enumerate(zip(theirs, ours, strict=False)) if pair[0] != pair[1]),
            min(len(theirs), len(ours)),
        )
        return [
            f"the server has another {what}: {len(other)} of {len(of_kind)} prompts have other tokens "
            f"there; `{first.reply.case.title}` has {len(theirs)} there and {len(ours)} here, and from token "
            f"{at} on it reads {_shown(tokens, theirs[at:])} there, {_shown(tokens, ours[at:])} here"
        ]
    return []


def _shown(tokens: ReferenceTokenizer, ids: Sequence[int]) -> str:
    if not ids:
        return "nothing more"
    try:
        text = tokens.show(ids[:12])
    except Exception:  # ids that are not in the tokenizer's vocabulary
        text = " ".join(map(str, ids[:12]))
    return repr(text if len(ids) <= 12 else f"{text}...")


def _answer_problems(compared: Sequence[ComparedPrompt], allowed: Tolerance) -> list[str]:
    problems = []
    foreign = [prompt for prompt in compared if prompt.foreign is not None]
    if foreign:
        problems.append(
            f"the server has another vocabulary: token {foreign[0].foreign} is beyond the checkpoint's"
        )
    silent = [prompt for prompt in compared if not prompt.reply.tokens]
    if silent:
        problems.append(
            f"{len(silent)} answers are empty, the one to `{silent[0].reply.case.title}` for example"
        )
    steps = [step for prompt in compared for step in prompt.steps]
    if not steps:
        return problems or ["no answers could be compared"]
    willful = sum(not step.greedy for step in steps)
    if willful:
        problems.append(f"{willful} of {len(steps)} tokens are not the server's own likeliest tokens")
    values = [value for step in steps for value in step.differences]
    largest, mean = max(values), _mean(values)
    if largest > allowed.largest:
        problems.append(
            f"log probabilities differ by up to {largest:.3g}, and {allowed.largest:.3g} is allowed"
        )
    if mean > allowed.mean:
        problems.append(
            f"log probabilities differ by {mean:.3g} on average, and {allowed.mean:.3g} is allowed"
        )
    tie = 2 * allowed.largest
    parted = [prompt for prompt in compared if prompt.parted(tie) is not None]
    if parted:
        step = parted[0].parted(tie) or 0
        problems.append(
            f"{len(parted)} of {len(compared)} answers differ from the checkpoint's by more than a tie; "
            f"`{parted[0].reply.case.title}` at token {step}, by {parted[0].steps[step].margin:.3g}"
        )
    return problems


def _row(prompt: ComparedPrompt, allowed: Tolerance) -> dict[str, Any]:
    """Return a prompt's row as plain data."""
    tie = 2 * allowed.largest
    return {
        "prompt": prompt.reply.case.title,
        "kind": prompt.reply.case.kind,
        "prompt_tokens": len(prompt.reply.prompt),
        "same_prompt": prompt.same_prompt,
        "tokens": len(prompt.reply.tokens),
        "parts_at": prompt.parted(tie),
        "ties": prompt.ties(tie),
        "largest": prompt.largest,
        "mean": prompt.mean,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
