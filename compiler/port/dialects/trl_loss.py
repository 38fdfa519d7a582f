"""TRL's losses: sft's, and what dpo and orpo are made of."""

from __future__ import annotations

from compiler.port.keys import Keys

REFERENCE = "the reference stays the model that training starts from here"


def speak(keys: Keys, objective: str) -> None:
    """Says what becomes of the loss's keys, and of the dropout that preferences switch off."""
    if objective == "sft":
        _supervised(keys)
        if keys.flag("use_peft"):
            keys.say("lora_dropout", {"lora.dropout": keys.number("lora_dropout")})
        return
    keys.say("beta", {"train.beta": keys.number("beta")})
    if keys.flag("use_peft"):
        if keys.flag("disable_dropout"):
            keys.say("disable_dropout", {"lora.dropout": 0.0})
            keys.same("lora_dropout", note="disable_dropout sets it to zero")
        else:
            keys.say("lora_dropout", {"lora.dropout": keys.number("lora_dropout")})
    keys.same("disable_dropout", note="the model here has no dropout of its own")
    if objective == "dpo":
        _dpo(keys)
    keys.passive(("generate_during_eval", "is_encoder_decoder"), "it trains nothing")
    keys.passive(("max_completion_length",), "for encoders with decoders")
    keys.unless("max_prompt_length", (), "a prompt is not cut for itself here: a sample is, at max_length")


def _supervised(keys: Keys) -> None:
    loss = keys.value("loss_type") or "nll"
    if loss not in ("nll", "chunked_nll"):
        message = f"the loss {loss} has no counterpart: the run here learns from the negative log-likelihood"
        keys.refuse("loss_type", "E1163", message, "loss_type: nll")
    keys.same("loss_type", note="the negative log-likelihood")


def _dpo(keys: Keys) -> None:
    loss = keys.value("loss_type") or ["sigmoid"]
    names = [loss] if isinstance(loss, str) else loss
    if names != ["sigmoid"]:
        shown = " + ".join(map(str, names)) if isinstance(names, list) else str(names)
        message = f"the preference loss {shown} has no counterpart: dpo here is the sigmoid loss"
        keys.refuse("loss_type", "E1163", message, "loss_type: sigmoid")
    keys.same("loss_type", note="dpo's own loss")
    divergence = keys.text("f_divergence_type")
    if divergence not in (None, "reverse_kl", "FDivergenceType.REVERSE_KL"):
        message = f"the divergence {divergence} has no counterpart: dpo here is of the reverse KL divergence"
        keys.refuse("f_divergence_type", "E1163", message, "f_divergence_type: reverse_kl")
    keys.same("f_divergence_type", note="dpo's own")
    keys.passive(("f_alpha_divergence_coef", "discopop_tau"), "of a loss that the run does not have")
    keys.passive(("label_smoothing",), "the sigmoid loss does not read it")
    keys.learnt("loss_weights", (None, [1.0], [1]), "the one loss has the weight 1 here")
    keys.learnt("ld_alpha", (None, 1.0), "tokens beyond the shorter answer count in full here")
    keys.learnt("use_weighting", (False,), "pairs are not weighted here")
    keys.learnt("sync_ref_model", (False,), REFERENCE)
    keys.passive(("ref_model_mixup_alpha", "ref_model_sync_steps"), REFERENCE)
    keys.passive(
        ("precompute_ref_log_probs", "precompute_ref_batch_size"), "when they are computed changes no number"
    )
