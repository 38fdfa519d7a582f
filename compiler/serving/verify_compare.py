"""Whether an endpoint's answers are a checkpoint's, up to the rounding of the types that it computes in.

How much rounding makes of these answers is measured, not assumed: the checkpoint is computed a second time in
the server's types, and the server may be `FACTOR` times as far from float32 as that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from compiler.serving.verify_endpoint import Reply
from compiler.serving.verify_reference import Reference, ServedTypes, Tokens
from runtime.progress import each

FACTOR = 3.0
"""Between the rounding of two programs in the same types: order of sums, kernels, batches."""

LARGEST, MEAN = 1e-3, 2.5e-4
"""Tolerances of log probabilities in float32, and the least ever. vLLM on a CPU was within 2.4e-4."""

ROUNDING = {"bfloat16": (0.12, 0.038), "fp8 keys and values": (0.74, 0.072), "fp8 weights": (1.5, 0.17)}
"""Largest and mean of what rounding makes of log probabilities, as seen on Gemma 3 270M in transformers, each
type with those before it. For a reference in bfloat16 itself, whose rounding cannot be measured."""


@dataclass(frozen=True)
class Tolerance:
    """What differences of log probabilities may be; `source` says where that comes from."""

    largest: float
    mean: float
    source: str


@dataclass(frozen=True)
class Step:
    """One token of an answer.

    Attributes:
        token, best: what the endpoint said, and the reference's likeliest.
        margin: how much likelier `best` is in the reference, as a difference of log probabilities.
        greedy: whether the endpoint said what it thought likeliest itself.
        told: log probabilities by the endpoint, of the tokens that it thought likeliest.
        exact, rounded: the same tokens' in the reference, and in the reference in the server's types.
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
class Compared:
    """One prompt.

    Attributes:
        wanted: the prompt in the checkpoint's tokens.
        steps: () where the endpoint's tokens are none of the checkpoint's.
        foreign: a token beyond the checkpoint's vocabulary.
    """

    reply: Reply
    wanted: tuple[int, ...]
    steps: tuple[Step, ...]
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
        """The first step whose token the reference would not say, by more than `tie`."""
        return next((i for i, step in enumerate(self.steps) if step.margin > tie), None)

    def ties(self, tie: float) -> int:
        """Steps where the two say different tokens that are as likely."""
        return sum(step.token != step.best and step.margin <= tie for step in self.steps)


def compare(
    replies: Sequence[Reply], tokens: Tokens, reference: Reference, types: ServedTypes, dtype: str
) -> list[Compared]:
    """Holds every reply against the checkpoint. The reference's model is in the server's types afterwards.

    Args:
        dtype: the type that the reference was loaded in.
    """
    compared = [_compare(reply, tokens, reference) for reply in each("computing the answers here", replies)]
    if dtype != "float32" or str(types) == "float32":
        return compared
    reference.lower(types)
    return [_rounded(one, reference, types) for one in each(f"computing them in {types}", compared)]


def _compare(reply: Reply, tokens: Tokens, reference: Reference) -> Compared:
    case = reply.case
    wanted = tokens.of_chat(case.messages) if case.messages is not None else tokens.of_text(case.text or "")
    beyond = [
        token
        for token in (*reply.prompt, *reply.tokens, *(token for step in reply.top for token in step))
        if not 0 <= token < reference.vocabulary
    ]
    if beyond or not reply.tokens or not reply.prompt:
        return Compared(reply, wanted, (), beyond[0] if beyond else None)
    logprobs = reference.logprobs(reply.prompt, reply.tokens)
    steps = []
    for at, token, top in zip(logprobs, reply.tokens, reply.top, strict=True):
        best = int(at.argmax())
        greedy = bool(top) and top.get(token, float("-inf")) >= max(top.values()) - 1e-6
        exact = tuple(float(at[other]) for other in top)
        steps.append(Step(token, best, float(at[best] - at[token]), greedy, tuple(top.values()), exact))
    return Compared(reply, wanted, tuple(steps))


def _rounded(one: Compared, reference: Reference, types: ServedTypes) -> Compared:
    """With the log probabilities of the reference in the server's types."""
    if not one.steps:
        return one
    logprobs = reference.logprobs(one.reply.prompt, one.reply.tokens, types.kv_cache)
    steps = [
        replace(step, rounded=tuple(float(at[token]) for token in top))
        for step, top, at in zip(one.steps, one.reply.top, logprobs, strict=True)
    ]
    return replace(one, steps=tuple(steps))


def tolerance(compared: Sequence[Compared], types: ServedTypes, dtype: str, given: float | None) -> Tolerance:
    """What the differences may be.

    Args:
        given: the largest, by the user.
    """
    if given is not None:
        return Tolerance(given, float("inf"), "given by --tolerance; the mean is not judged")
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
    rounding = [value for one in compared for step in one.steps for value in step.rounding]
    if not rounding:
        return Tolerance(LARGEST, MEAN, "the server computes in float32")
    largest, mean = max(rounding), _mean(rounding)
    return Tolerance(
        max(LARGEST, FACTOR * largest),
        max(MEAN, FACTOR * mean),
        f"{FACTOR:g} times what rounding to {types} makes of these answers in transformers (largest "
        f"{largest:.2g}, mean {mean:.2g})",
    )


def problems(compared: Sequence[Compared], allowed: Tolerance, tokens: Tokens) -> list[str]:
    """Why the endpoint's answers are not the checkpoint's, a sentence each; [] when they are."""
    return [*_prompt_problems(compared, tokens), *_answer_problems(compared, allowed)]


def _prompt_problems(compared: Sequence[Compared], tokens: Tokens) -> list[str]:
    """A tokenizer or a template that is another one; under another tokenizer, no word of the template."""
    for kind, what in (("text", "tokenizer"), ("chat", "chat template")):
        of_kind = [one for one in compared if one.reply.case.kind == kind]
        other = [one for one in of_kind if not one.same_prompt]
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


def _shown(tokens: Tokens, ids: Sequence[int]) -> str:
    if not ids:
        return "nothing more"
    try:
        text = tokens.show(ids[:12])
    except Exception:  # ids that the tokenizer does not have
        text = " ".join(map(str, ids[:12]))
    return repr(text if len(ids) <= 12 else f"{text}...")


def _answer_problems(compared: Sequence[Compared], allowed: Tolerance) -> list[str]:
    found = []
    foreign = [one for one in compared if one.foreign is not None]
    if foreign:
        found.append(
            f"the server has another vocabulary: token {foreign[0].foreign} is beyond the checkpoint's"
        )
    silent = [one for one in compared if not one.reply.tokens]
    if silent:
        found.append(
            f"{len(silent)} answers are empty, the one to `{silent[0].reply.case.title}` for example"
        )
    steps = [step for one in compared for step in one.steps]
    if not steps:
        return found or ["nothing could be compared"]
    willful = sum(not step.greedy for step in steps)
    if willful:
        found.append(f"{willful} of {len(steps)} tokens are not what the server itself thought likeliest")
    values = [value for step in steps for value in step.differences]
    largest, mean = max(values), _mean(values)
    if largest > allowed.largest:
        found.append(f"log probabilities differ by up to {largest:.3g}, and {allowed.largest:.3g} is allowed")
    if mean > allowed.mean:
        found.append(f"log probabilities differ by {mean:.3g} on average, and {allowed.mean:.3g} is allowed")
    tie = 2 * allowed.largest
    parted = [one for one in compared if one.parted(tie) is not None]
    if parted:
        step = parted[0].parted(tie) or 0
        found.append(
            f"{len(parted)} of {len(compared)} answers part from the checkpoint's by more than a tie; "
            f"`{parted[0].reply.case.title}` at token {step}, by {parted[0].steps[step].margin:.3g}"
        )
    return found


def as_data(one: Compared, allowed: Tolerance) -> dict[str, Any]:
    """A prompt's row, as plain data."""
    tie = 2 * allowed.largest
    return {
        "prompt": one.reply.case.title,
        "kind": one.reply.case.kind,
        "prompt_tokens": len(one.reply.prompt),
        "same_prompt": one.same_prompt,
        "tokens": len(one.reply.tokens),
        "parts_at": one.parted(tie),
        "ties": one.ties(tie),
        "largest": one.largest,
        "mean": one.mean,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
