"""Tests of each pair loss against TRL's code, in float32, on made-up logits."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch

from recipec.runtime.settings import TrainSettings
from recipec.runtime.training.objective_losses import preference_loss
from recipec.runtime.training.objectives import OBJECTIVES

BETA, SMOOTHING = 0.3, 0.1
LOSSES = {
    "dpo": ["sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "apo_zero", "apo_down", "sppo_hard"],
    "cpo": ["sigmoid", "hinge", "ipo", "simpo"],
}
WORDS, LENGTH = 5, 9
ROWS = [(1, 5), (1, 2), (3, 4), (3, 8), (2, 9), (2, 3)]
"""The lengths of the prompt and of the whole text of three pairs, alternately chosen and rejected."""


@pytest.mark.parametrize(
    ("objective", "loss_type"), [(objective, loss) for objective, names in LOSSES.items() for loss in names]
)
def test_pair_loss_gradient_and_rewards_match_trl(objective: str, loss_type: str) -> None:
    """Compare the loss and its gradient to 1e-5. A fourth pair fills up our batch."""
    more: dict[str, Any] = {"loss_type": loss_type}
    smoothed = "label_smoothing" in OBJECTIVES[objective].reads(loss_type)
    if smoothed and (objective, loss_type) != ("dpo", "sigmoid"):  # which has none in TRL
        more["label_smoothing"] = SMOOTHING
    sizes = {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1}
    settings = TrainSettings(objective=objective, beta=BETA, simpo_gamma=0.4, cpo_alpha=0.7, **more, **sizes)
    random = np.random.default_rng(5)
    policy, before = (random.normal(0.0, 1.5, (8, LENGTH, WORDS)).astype(np.float32) for _ in range(2))
    tokens = random.integers(0, WORDS, (8, LENGTH)).astype(np.int32)
    place = np.arange(LENGTH)
    whole = np.stack([place < end for _, end in ROWS] + [place < 0] * 2)
    answer = np.stack([(place >= start) & (place < end) for start, end in ROWS] + [place < 0] * 2)
    batch = {"tokens": tokens, "positions": tokens, "segment_ids": whole.astype(np.int32)}
    batch |= {"loss_mask": answer, "norm": np.float32(3)}

    def logps(logits: Any) -> Any:
        found = jax.nn.log_softmax(logits[:, :-1])
        found = jax.numpy.take_along_axis(found, tokens[:, 1:, None], -1)[..., 0]
        return lambda *_: jax.numpy.pad(found, ((0, 0), (0, 1)))

    def loss(logits: Any) -> Any:
        return preference_loss(logps(logits), logps(before), batch, settings)

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(policy)
    expected, theirs, logged = by_trl(settings, torch.tensor(policy[:6]), torch.tensor(before[:6]), batch)
    assert float(value) == pytest.approx(expected, rel=1e-5)
    assert np.abs(theirs).max() > 0.01 and np.abs(gradient[:6] - theirs).max() <= 1e-5
    assert not np.asarray(gradient[6:]).any()
    assert [float(metrics[f"rewards_{name}"]) for name in ("chosen", "rejected")] == pytest.approx(
        logged, rel=1e-5
    )


def by_trl(settings: Any, policy: Any, before: Any, batch: dict[str, Any]) -> tuple[float, Any, list[float]]:
    """Return TRL's loss of the first three pairs, its gradient by the logits, and the mean rewards."""
    order = [0, 2, 4, 1, 3, 5]  # all chosen answers before the rejected ones
    ids = torch.tensor(batch["tokens"][order]).long()
    whole = torch.tensor(batch["segment_ids"][order]).long()
    answer = torch.tensor(batch["loss_mask"][order]).long()
    labels = ids.masked_fill(answer == 0, -100)
    leaf = policy.clone().requires_grad_()

    def model(logits: Any) -> Any:
        def asked(*_: Any, **__: Any) -> Any:
            of = torch.log_softmax(logits[order][:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
            kept = torch.where(labels[:, 1:] != -100, of, 0.0)
            none = torch.zeros_like(kept)
            found = {"logits": logits[order], "log_probs": kept, "entropy": none, "mean_logits": none}
            return SimpleNamespace(**found, is_top1=none.bool())

        return asked

    alike = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x, device=torch.device("cpu"))
    more = {
        name: getattr(settings, name)
        for name in ("beta", "label_smoothing", "loss_type", "simpo_gamma", "cpo_alpha")
    }
    trainer: Any = SimpleNamespace(**more, accelerator=alike, alpha=0.0, aux_loss_enabled=False)
    if settings.objective == "cpo":
        from trl.experimental.cpo import CPOTrainer

        trainer.is_encoder_decoder, trainer.pad_token_id = False, 0
        trainer.concatenated_inputs, trainer.get_batch_logps = (
            CPOTrainer.concatenated_inputs,
            CPOTrainer.get_batch_logps,
        )
        for name in ("concatenated_forward", "cpo_loss"):
            setattr(trainer, name, getattr(CPOTrainer, name).__get__(trainer))
        given = {}
        for kind, part in (("chosen", slice(0, 3)), ("rejected", slice(3, 6))):
            names = {"input_ids": ids, "attention_mask": whole, "labels": labels}
            given |= {f"{kind}_{name}": value[part] for name, value in names.items()}
        loss, logged = CPOTrainer.get_batch_loss_metrics(trainer, model(leaf), given)
    else:
        from trl import DPOTrainer

        trainer.model, trainer._metrics = SimpleNamespace(training=True), {"train": defaultdict(list)}
        trainer.loss_types, trainer.loss_weights = [settings.loss_type], [1.0]
        trainer.f_divergence_type, trainer.ld_alpha, trainer.use_weighting = "reverse_kl", None, False
        trainer.precompute_ref_logps, trainer._total_train_tokens, trainer._tp_size = True, 0, 1
        reference = model(before)().log_probs.sum(1)
        given = {"input_ids": ids, "attention_mask": whole, "completion_mask": answer}
        given |= {"ref_chosen_logps": reference[:3], "ref_rejected_logps": reference[3:]}
        loss = DPOTrainer._compute_loss(trainer, model(leaf), given, False)
        logged = trainer._metrics["train"]
    loss.backward()
    rewards = [float(np.mean(logged[f"rewards/{kind}"])) for kind in ("chosen", "rejected")]
    return float(loss.detach()), leaf.grad.numpy(), rewards
