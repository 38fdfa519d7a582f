"""The two sides of an evaluation, the base and the fine-tuned model: where each is served, and whether it is
still the model that gave the answers on disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runtime.errors import UserError
from runtime.serving.client import STATUS, Client, ServerError, pick
from runtime.serving.evaluate_answers import Settings, request
from runtime.serving.evaluate_prompts import Prompt

BASE, TUNED = "base", "tuned"
TITLES = {BASE: "base", TUNED: "fine-tuned"}

SAME_MODEL = 0.2
"""The largest difference of a log probability between two answers of one model: bfloat16 and other neighbours
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
    names = client.models()
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
    path, body = request(model, prompt, 0, Settings(max_tokens=1))
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
