"""The objectives of a run by TRL: the loss of a piece, from the log-probabilities of TRL's fused head.

Every loss is a sum over the rows or pairs of a piece, each with the weight that `Pieces` gave it, so that the
pieces of a step sum up to train.py's loss of the step. TRL's own preference trainers cannot compute that.
DPOTrainer averages over a batch's pairs, including pairs that only fill up a last batch, and its sigmoid loss
ignores label smoothing. ORPOTrainer and CPOTrainer of trl.experimental average their likelihood over the
tokens of one process's piece, so that the loss depends on the number of processes; they also materialize the
full logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from peft import PeftModel
from torch.nn.functional import logsigmoid
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from ...settings import TrainSettings
from ...training.objectives import OBJECTIVES
from ...training.preference_losses import Functions, pair_loss, unpaired_losses
from .picture_inputs import ARGUMENTS as PICTURES
from .pieces import OTHER

TEXTS = ("input_ids", "position_ids", "labels")

Tensors = dict[str, torch.Tensor]
Objective = Callable[[Any, Any, Mapping[str, Any]], tuple[torch.Tensor, Tensors]]
"""(model, the model that training starts from, piece of `Pieces` as tensors) -> the loss, float32[], and the
objective's other numbers, which are summed like the loss. The second model is the first without its wrapper
for several processes, within its disable_adapter(); for full fine-tuning, it is a separate model."""


def objective_of(train: TrainSettings) -> Objective:
    """Return the loss function of a recipe's train.objective."""
    loss = {"": _sft, "preference": _preference, "unpaired_preference": _unpaired}[
        OBJECTIVES[train.objective].format
    ]
    if train.router_aux_loss_coef:
        return lambda model, reference, piece: _balanced(loss, model, reference, piece, train)
    return lambda model, reference, piece: loss(model, reference, piece, train)


def _balanced(
    loss: Callable[..., tuple[torch.Tensor, Tensors]],
    model: Any,
    reference: Any,
    piece: Mapping[str, Any],
    train: TrainSettings,
) -> tuple[torch.Tensor, Tensors]:
    """Add, in training, the load-balancing loss of the piece's real tokens to an objective's loss.

    TRL's fused head returns that loss of all tokens, unless it gets an attention mask, which rows of several
    samples cannot have. So the routers' logits are taken from the decoder, whose output the head reads.
    """
    if not model.training:
        return loss(model, reference, piece, train)
    decoder, routed = decoder_of(model), list[tuple[torch.Tensor, ...]]()

    def observed(**inputs: Any) -> Any:
        hook = decoder.register_forward_hook(lambda *call: routed.append(call[-1].router_logits))
        try:
            return model(**inputs)
        finally:
            hook.remove()

    total, more = loss(observed, reference, piece, train)
    auxiliary = _load_balancing(decoder.config.get_text_config(), routed[0], piece["real"]) * piece["share"]
    return total + train.router_aux_loss_coef * auxiliary, {**more, "aux_loss": auxiliary.detach()}


def decoder_of(model: Any) -> Any:
    """Return the decoder of a causal language model, without wrappers for several processes or adapters."""
    inner: Any = extract_model_from_parallel(model)
    return (inner.get_base_model() if isinstance(inner, PeftModel) else inner).base_model


def _load_balancing(config: Any, logits: tuple[torch.Tensor, ...], real: torch.Tensor) -> Any:
    """Return transformers' load-balancing loss of the tokens that are not padding; 0 if all are padding."""
    if not bool(real.any()):
        return sum(layer.sum() for layer in logits) * 0.0
    return load_balancing_loss_func(
        logits, config.num_experts, config.num_experts_per_tok, real.to(torch.int64)
    )


def _log_probs(model: Any, piece: Mapping[str, Any]) -> torch.Tensor:
    """Return float32[B, T - 1]: at t the log-probability of labels[:, t + 1], or 0 if that label is -100."""
    inputs = {name: piece[name] for name in (*TEXTS, *PICTURES) if name in piece}
    logps: torch.Tensor = model(**inputs, use_cache=False, fused_lm_head=True).log_probs
    return logps


def _likelihood(log_probs: torch.Tensor, piece: Mapping[str, Any]) -> torch.Tensor:
    """Return the targets' negative log-likelihood; each row is multiplied by its weight."""
    return -(log_probs * piece["weights"][:, None]).sum()


def _sft(model: Any, _: Any, piece: Mapping[str, Any], train: TrainSettings) -> tuple[torch.Tensor, Tensors]:
    log_probs = _log_probs(model, piece)
    if train.loss_type == "dft":
        log_probs = log_probs * log_probs.detach().exp()
    return _likelihood(log_probs, piece), {}


def _preference(
    model: Any, reference: Any, piece: Mapping[str, Any], train: TrainSettings
) -> tuple[torch.Tensor, Tensors]:
    """Return the pairs' losses (preference_losses.py) plus the likelihood loss of the chosen texts."""
    objective, loss = OBJECTIVES[train.objective], pair_loss(train)
    before: torch.Tensor | float = 0.0
    compared = objective.refers(train.loss_type)
    if compared:
        with torch.no_grad(), reference.disable_adapter():
            before = _summed(_log_probs(reference, piece), piece)
    log_probs = _log_probs(model, piece)
    sums = _summed(log_probs, piece) - before
    worth = sums / piece["answers"].sum(1).clamp(min=1) if loss.mean else sums
    total = _weighed(loss.of(FUNCTIONS, worth[0::2], worth[1::2], train), piece)
    if objective.likelihood:
        total = total + train.cpo_alpha * _likelihood(log_probs, piece)
    return total, _metrics(train.beta * (sums if compared else worth), piece)


def _unpaired(
    model: Any, reference: Any, piece: Mapping[str, Any], train: TrainSettings
) -> tuple[torch.Tensor, Tensors]:
    """Return the losses of single answers (preference_losses.py)."""

    def gains_of(rows: Mapping[str, Any], graded: bool) -> torch.Tensor:
        with torch.no_grad(), reference.disable_adapter():
            before = _log_probs(reference, rows).sum(1)
        with torch.set_grad_enabled(graded and torch.is_grad_enabled()):
            return _log_probs(model, rows).sum(1) - before

    gains = gains_of(piece, True)
    kl: torch.Tensor | float = 0.0
    if train.loss_type in OBJECTIVES[train.objective].mismatched:
        others = {name.removeprefix(OTHER): piece[name] for name in piece if name.startswith(OTHER)}
        some = (others["labels"] != -100).any(1)
        distance = torch.stack([torch.where(some, gains_of(others, False), 0.0).sum(), some.sum()])
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(distance)
        kl = (distance[0] / distance[1].clamp(min=1)).clamp(min=0)
    sides, weights = piece["desirable"].sign(), piece["pair_weights"]
    losses = unpaired_losses(torch.sigmoid, gains, sides, kl, train)
    total = (torch.where(weights > 0, losses, 0.0) * weights).sum()
    rewards = train.beta * gains.detach() * piece["desirable"].abs()
    chosen, rejected = (torch.where(sides == side, rewards, 0.0).sum() for side in (1, -1))
    metrics = {"kl": kl * piece["share"], "rewards_chosen": chosen, "rewards_rejected": rejected}
    return total, metrics | {"rewards_margin": chosen - rejected}


def _summed(log_probs: torch.Tensor, piece: Mapping[str, Any]) -> torch.Tensor:
    """Return float32[2 P]: the sum of the log-probabilities of each answer's tokens."""
    return torch.where(piece["answers"][:, 1:], log_probs, 0.0).sum(1)


FUNCTIONS = Functions(torch.exp, torch.log1p, torch.relu, torch.sigmoid, logsigmoid)


def _weighed(values: torch.Tensor, piece: Mapping[str, Any]) -> torch.Tensor:
    """Return the weighted sum of the pairs' values, float32[P]; values of filler pairs may be undefined."""
    weights = piece["pair_weights"][0::2]
    return (torch.where(weights > 0, values, 0.0) * weights).sum()


def _metrics(rewards: torch.Tensor, piece: Mapping[str, Any]) -> Tensors:
    """Return runtime.training.objective_losses's METRICS, from the rewards of the answers, float32[2 P]."""
    chosen, rejected = rewards.detach()[0::2], rewards.detach()[1::2]
    values = {
        "rewards_accuracy": (chosen > rejected).to(rewards.dtype),
        "rewards_chosen": chosen,
        "rewards_margin": chosen - rejected,
        "rewards_rejected": rejected,
    }
    return {name: _weighed(value, piece) for name, value in values.items()}
