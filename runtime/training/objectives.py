"""The objectives that a run can train for, a row for each. Imports no jax: the compiler reads this file.

The losses of tokens are in losses.py, of pairs and single answers in preference_losses.py. The losses of
micro-batches are in objective_losses.py, and for PyTorch in backends/trl/trl_objectives.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from ..sections import Grpo


@dataclass(frozen=True)
class Objective:
    """What distinguishes an objective from the others.

    Attributes:
        title: for a model card.
        format: the `data.format` that only this objective reads; "" where samples are texts to write.
        losses: the losses that train.loss_type chooses from, if `settings` has it, each with the keys of
            `train` that only it reads. For pairs they are keys of `preference_losses.PAIR_LOSSES`, for texts
            to write "nll" and keys of `losses.TOKEN_LOSSES`.
        reference: losses for which the model that training starts from runs a forward pass too.
        likelihood: which part of the chosen texts adds its likelihood to the loss, times train.cpo_alpha:
            "text" (with the prompt), "answer", or "" for none. It is the mean over a micro-batch's tokens,
            so the loss of a step depends on how many rows its micro-batches have.
        settings: keys of `train` that the objective reads with every loss.
        mismatched: losses that also run the models on prompts with other rows' answers, so that the loss
            of a step depends on which rows its micro-batches have.
        teacher: whether another model, which is not trained, runs a forward pass too.
    """

    title: str
    format: str = ""
    losses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    reference: tuple[str, ...] = ()
    likelihood: str = ""
    settings: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    teacher: bool = False

    @property
    def pairs(self) -> bool:
        """Return whether a sample is a preference: two rows, the chosen answer's and the rejected one's."""
        return self.format == "preference"

    @property
    def rows(self) -> int:
        """Return the number of rows of a sample."""
        return 2 if self.pairs else 1

    def refers(self, loss_type: str) -> bool:
        """Return whether a loss needs the model that training starts from."""
        return self.loss(loss_type) in self.reference

    def loss(self, loss_type: str) -> str | None:
        """Return the key of `losses` that train.loss_type names; None if there is no such loss."""
        name = loss_type if "loss_type" in self.settings else next(iter(self.losses), None)
        return name if name in self.losses else None

    def reads(self, loss_type: str) -> tuple[str, ...]:
        """Return the keys of `train` that the objective reads with a loss; an unknown one is its first."""
        name = self.loss(loss_type) or next(iter(self.losses))
        return *self.settings, *self.losses[name]


NLL = "nll"
"""The plain loss of texts to write. TrainSettings do not name it."""
OF_DPO: Mapping[str, tuple[str, ...]] = {
    **{name: ("label_smoothing",) for name in ("sigmoid", "robust")},
    **{name: () for name in ("sigmoid_norm", "hinge", "ipo", "apo_zero", "apo_down", "sppo_hard")},
}
OF_KTO: Mapping[str, tuple[str, ...]] = {"kto": (), "apo_zero_unpaired": ()}
OBJECTIVES = {
    "sft": Objective(
        "supervised fine-tuning",
        losses={
            NLL: ("label_smoothing", "z_loss", "neftune_noise_alpha"),
            "dft": ("neftune_noise_alpha",),
            "eaft": ("eaft_alpha", "eaft_top_k", "eaft_entropy", "neftune_noise_alpha"),
            "asft": ("asft_alpha",),
        },
        reference=("asft",),
        settings=("loss_type",),
    ),
    "dpo": Objective(
        "direct preference optimization (DPO)",
        "preference",
        losses=OF_DPO,
        reference=(*OF_DPO,),
        settings=("beta", "loss_type"),
    ),
    "cpo": Objective(
        "contrastive preference optimization (CPO)",
        "preference",
        losses={
            "sigmoid": ("label_smoothing",),
            **{"hinge": (), "ipo": ()},
            "simpo": ("simpo_gamma", "label_smoothing"),
        },
        likelihood="answer",
        settings=("beta", "loss_type", "cpo_alpha"),
    ),
    "orpo": Objective(
        "odds ratio preferences (ORPO)",
        "preference",
        losses={"odds_ratio": ()},
        likelihood="text",
        settings=("beta",),
    ),
    "kto": Objective(
        "Kahneman-Tversky optimization (KTO)",
        "unpaired_preference",
        losses=OF_KTO,
        reference=(*OF_KTO,),
        settings=("beta", "loss_type", "desirable_weight", "undesirable_weight"),
        mismatched=("kto",),
    ),
    "grpo": Objective(
        "group relative policy optimization (GRPO)",
        "prompt",
        losses={"policy": ()},
        settings=("grpo",),
    ),
    "distill": Objective(
        "distillation from a teacher",
        losses={"divergence": ()},
        settings=("distill",),
        teacher=True,
    ),
}

ROW, TOKEN = "row", "token"


class Further(NamedTuple):
    """An array of a micro-batch that only one objective has.

    Attributes:
        size: ROW for a value of each row, TOKEN of each token.
        more: further dimensions, behind the tokens.
        dtype: of its numbers.
    """

    size: str
    more: tuple[int, ...] = ()
    dtype: str = "float32"


def corrects(rollout: Any) -> bool:
    """Return whether the loss is corrected for the other log-probabilities of a server that generates."""
    return rollout is not None and rollout.engine == "vllm" and rollout.importance_sampling_correction


def further_arrays(train: Any, rollout: Any = None) -> dict[str, Further]:
    """Return the arrays that micro-batches have for the objective alone, by name."""
    row, token = Further(ROW), Further(TOKEN)
    if train.grpo is not None:
        more = {"old": token} if train.grpo.iterations > 1 else {}
        more |= {"correction": token} if corrects(rollout) else {}
        return {"advantages": row, "weights": row, **more}
    if stores(train):
        count = train.distill.top_k
        return {
            LIKELIEST[0]: Further(TOKEN, (count,), "int32"),
            LIKELIEST[1]: Further(TOKEN, (count + 1,)),
        }
    return {"desirable": row} if OBJECTIVES[train.objective].format == "unpaired_preference" else {}


LIKELIEST = ("teacher_tokens", "teacher_logps")
"""Arrays of a micro-batch with a teacher that is stored: its likeliest tokens int32[B, T, K] at the token
before, and float32[B, T, K + 1] their log-probabilities with that of all other tokens together."""


def stores(train: Any) -> bool:
    """Return whether a run reads its teacher's stored log-probabilities."""
    return train.objective == "distill" and train.distill is not None and train.distill.stored is not None


@dataclass(frozen=True)
class Generated:
    """The completions that a run generates and trains on.

    Attributes:
        prompt, completion: the most tokens of a prompt, and of a completion with its end.
        group: completions of each prompt.
        iterations: optimizer steps on the same completions.
        share: of the optimizer steps that train on completions.
        temperature, top_k, top_p, min_p: as for `sampling.Sampling`.
    """

    prompt: int
    completion: int
    group: int = 1
    iterations: int = 1
    share: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def generated(train: Any, max_length: int) -> Generated | None:
    """Return the completions of a run: grpo's, or a student's own answers; None for a run without any.

    Args:
        max_length: data.max_length.
    """
    grpo, distill = train.grpo, train.distill
    if train.objective == "grpo" and grpo is not None:
        return Generated(
            prompt=grpo.max_prompt_length,
            completion=grpo.max_completion_length,
            group=grpo.num_generations,
            iterations=grpo.iterations,
            temperature=grpo.temperature,
            top_k=grpo.top_k,
            top_p=grpo.top_p,
            min_p=grpo.min_p,
        )
    if train.objective == "distill" and distill is not None and distill.lmbda:
        return Generated(
            prompt=max_length - distill.max_completion_length,
            completion=distill.max_completion_length,
            share=distill.lmbda,
            temperature=distill.sampling_temperature,
        )
    return None


QUIET = {"label_smoothing": 0.0, "z_loss": 0.0, "desirable_weight": 1.0, "undesirable_weight": 1.0}
"""Values of these keys that `settings_of` leaves out; it leaves out an objective's first loss too."""


OF_OWN_ANSWERS = ("lmbda", "max_completion_length", "sampling_temperature")
"""Keys of train.distill that a run with lmbda 0 does not read."""
SHOWN = ("num_generations", "loss", "beta")
"""Keys of train.grpo that `settings_of` states at their defaults too."""


def keeps_copy(train: Any, lora: Any) -> bool:
    """Return whether a run keeps a copy of what it starts from, as the loss's reference. Without a copy,
    the reference is the base without its fresh adapters. A run from lora.start_from keeps one, as in TRL, and
    so does one that trains whole modules or rows, whose original values are nowhere else."""
    kept = lora is None or lora.start_from is not None or bool(lora.modules_to_save or lora.trainable_tokens)
    return compares(train) and kept


def compares(train: Any) -> bool:
    """Return whether the loss needs the model that training starts from."""
    if train.grpo is not None:
        return bool(train.grpo.beta)
    return OBJECTIVES[train.objective].refers(train.loss_type)


def settings_of(train: Mapping[str, Any]) -> str:
    """Describe the keys of a recipe's `train` that its objective reads: ", beta 0.1, loss_type ipo"."""
    objective = OBJECTIVES[train["objective"]]
    loss_type = train.get("loss_type", "sigmoid")
    quiet = {**QUIET, "loss_type": next(iter(objective.losses))}
    read = objective.reads(loss_type)
    train = {**train, "loss_type": objective.loss(loss_type)}
    values: dict[str, Any] = {}
    for key in read:
        value = train.get(key)
        values |= value if isinstance(value, Mapping) else {key: value}
    teacher = values.pop("teacher", None)
    if isinstance(teacher, Mapping):
        values = {"teacher": teacher["id"], **values}
    quiet |= {key: value for key, value in asdict(Grpo()).items() if key not in SHOWN}
    if values.get("lmbda") == 0:
        values = {key: value for key, value in values.items() if key not in OF_OWN_ANSWERS}
    if "stored" in values and values["stored"] is None:
        values.pop("top_k")
    values = {key: value for key, value in values.items() if value not in (None, [], quiet.get(key))}
    return "".join(f", {key} {_written(value)}" for key, value in values.items())


def _written(value: Any) -> str:
    """Return a value as a person writes it in a recipe."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return " ".join(map(json.dumps, value))
    return value if isinstance(value, str) else format(value, "g")
