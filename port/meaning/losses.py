"""The keys of TRL's losses, packing and row formats, for every tool that runs TRL's trainers."""

from __future__ import annotations

from typing import Any

from recipec.compiler.wording import listing
from recipec.port.engine import Says, Statements
from recipec.port.keys import Keys, table, words
from recipec.port.meaning import datasets, images
from recipec.port.refusals import E1142, E1145, E1163, W1168
from recipec.runtime.training.objectives import OBJECTIVES
from recipec.spec.diagnostics import Diagnostic

OF_SFT = table("""
exact eval_packing: recipec packs evaluation rows like training rows: the loss is a mean over tokens
exact loss_type: the negative log-likelihood
""")
OF_PREFERENCES = table("""
exact disable_dropout: recipec's model has no dropout of its own
exact generate_during_eval is_encoder_decoder: it does not affect training
exact max_completion_length: only for encoder-decoder models
lost max_prompt_length
""")
OF_DPO = table("""
exact loss_type: the objective's own loss
exact f_divergence_type: dpo's own
exact f_alpha_divergence_coef discopop_tau: a setting of a loss that the run does not have
exact label_smoothing: the loss does not read it
learned loss_weights=null/[1.0]/[1] rpo_alpha=null/0/0.0 ld_alpha=null/1.0 use_weighting=false
    sync_ref_model=false
exact ref_model_mixup_alpha ref_model_sync_steps: recipec's reference stays the model that training starts
    from
exact precompute_ref_log_probs precompute_ref_batch_size: it decides when they are computed, not their values
""")
OF_ALL = table("""
number beta -> train.beta
""")
OF_CPO = table("""
exact loss_type: the objective's own loss
exact label_smoothing simpo_gamma: the loss does not read it
learned alpha=0/0.0
""")
OF_KTO = table("""
exact loss_type: the objective's own loss
learned sync_ref_model=false
exact ref_model_mixup_alpha ref_model_sync_steps: recipec's reference stays the model that training starts
    from
exact precompute_ref_log_probs precompute_ref_batch_size: it decides when they are computed, not their values
""")
TRLS = {"dpo": words("robust"), "cpo": words("sigmoid simpo")}
"""The losses that read label_smoothing in TRL, by objective."""


UNPAIRED = "unpaired_preference"
"""The format of single answers, each desirable or not."""
PAIRED = "TRL splits a row with a chosen and a rejected answer into two samples; recipec cannot"


def form(keys: Keys, objective: str, path: str | None, where: tuple[Keys, str]) -> Statements[str]:
    """Return the format of the rows. TRL recognizes it by the columns, read if the file is at hand."""
    row = datasets.first_row(path, keys.source.path.parent) if path else None
    if fixed := OBJECTIVES[objective].format:
        if fixed == UNPAIRED and row is not None and {"chosen", "rejected"} <= row.keys():
            yield keys.withdraw(where[1])
            yield keys.refuse(
                where[1], E1142, PAIRED, "rows of prompt, completion and label; or objective: dpo"
            )
        yield keys.sets("data.format", fixed)
        return fixed
    column = keys.text("dataset_text_field") or "text"
    if row is not None:
        form = _of_columns(row, column)
        why = f"from the columns of {path}" if form else ""
    elif images.trained_on(keys):
        form, why = "chat", f"{keys.tool}'s collator of pictures takes conversations"
    elif keys.flag("assistant_only_loss"):
        form, why = "chat", "assistant_only_loss is only for conversations"
    elif keys.value("completion_only_loss") is True:
        form, why = "prompt_completion", "completion_only_loss is only for prompts and completions"
    elif keys.given("dataset_text_field"):
        form, why = "text", "dataset_text_field names a column of text"
    else:
        form, why = None, ""
    if form is None:
        form, why = "chat", "not known from the files: TRL decides by the columns of the data set"
    if why.startswith("not known") and path is not None:
        message = "the format of the data is a guess: TRL decides by the columns of the data set"
        help = "chat fits a column `messages`; otherwise set data.format and data.loss_on in the recipe"
        key = where[0].prefix + where[1]
        yield keys.warn(Diagnostic(W1168, message, key, help, keys.source.span(key)))
    yield keys.sets("data.format", form, why)
    if form == "text" and column != "text":
        yield keys.say("dataset_text_field", {"data.fields": {"text": column}})
    yield keys.same("dataset_text_field", note="the column with the text, if the rows hold text")
    return form


def _of_columns(row: dict[str, Any], column: str) -> str | None:
    if "messages" in row or "conversations" in row:
        return "chat"
    if "prompt" in row and "completion" in row:
        return "prompt_completion"
    return "text" if column in row else None


def masks(keys: Keys, form: str) -> Says:
    """State which tokens carry loss."""
    assistant, completion = keys.flag("assistant_only_loss"), keys.value("completion_only_loss")
    if form == "chat":
        yield keys.say("assistant_only_loss", {"data.loss_on": "assistant" if assistant else "all"})
        if completion is True:
            message = "completion_only_loss is for prompts and completions, and the rows are conversations"
            yield keys.refuse("completion_only_loss", E1145, message, "assistant_only_loss: true")
        yield keys.same("completion_only_loss", note="only for prompts and completions")
    elif form == "prompt_completion":
        on = "all" if completion is False else "completion"
        keys.defaults = {**keys.defaults, "completion_only_loss": "auto"}
        yield keys.say("completion_only_loss", {"data.loss_on": on})
        yield keys.same("assistant_only_loss", note="the loss covers the completion")
    else:
        yield keys.sets("data.loss_on", "all")
        names = ("completion_only_loss", "assistant_only_loss")
        yield from keys.passive(names, "the rows are text, and the loss covers all of it")
    if form == "chat":
        yield keys.same("eos_token", note="the chat template ends a turn")
    yield keys.unless("eos_token", (None,), "recipec ends a sample with the tokenizer's own end of text")


CUT = "a sample in recipec attends only to itself, and is whole or truncated; the tool cuts rows anywhere"


def packing(keys: Keys, always: str = "") -> Says:
    """State whether samples are packed.

    Args:
        always: why the tool packs whatever the file says, "" if the file decides.
    """
    if always:
        note = f"{always}; {CUT}"
        if keys.given("packing"):
            yield keys.say("packing", {"data.packing": True}, note)
        yield keys.default("packing", True, {"data.packing": True}, note)
        yield keys.same("packing_strategy", note="another key decides it")
        return
    on = keys.flag("packing")
    strategy = str(keys.value("packing_strategy"))
    notes = {
        "bfd": "",
        "bfd_split": "recipec truncates a long sample; the tool continues it in other rows",
    }
    yield keys.say("packing", {"data.packing": on}, notes.get(strategy, CUT) if on else "")
    note = "which samples share a row; each attends only to itself" if on else "no packing"
    yield keys.same("packing_strategy", note=note)


def supervised(keys: Keys) -> Says:
    loss = keys.value("loss_type") or "nll"
    if loss == "dft":
        yield from weighted(keys, "loss_type", loss)
    elif loss not in ("nll", "chunked_nll"):
        losses = listing(OBJECTIVES["sft"].losses)
        message = f"the loss {loss} has no counterpart: recipec's sft has {losses}"
        yield keys.refuse("loss_type", E1163, message, "loss_type: nll")
    yield from keys.follow(OF_SFT)


def weighted(keys: Keys, key: str, loss: str, note: str = "") -> Says:
    """State a key that selects a loss that weights tokens."""
    yield keys.say(key, {"train.loss_type": loss}, note)
    yield from keys.passive(("label_smoothing_factor",), f"the loss {loss} does not read it")


def of_pairs(
    keys: Keys,
    objective: str,
    names: tuple[str, str] = ("loss_type", "label_smoothing"),
    smoothed: frozenset[str] | None = None,
) -> Says:
    """State the loss of a pair, and the keys that only this loss reads."""
    key, smoothing = names
    known, losses = OBJECTIVES[objective].losses, keys.value(key) or "sigmoid"
    every = losses if isinstance(losses, list) else [losses]
    loss = every[0] if len(every) == 1 else None
    if loss not in known:
        shown = " + ".join(map(str, every))
        message = (
            f"the preference loss {shown} has no counterpart: recipec's {objective} has {listing(known)}"
        )
        yield keys.refuse(key, E1163, message, f"{key}: sigmoid")
        loss = "sigmoid"
    elif loss != "sigmoid":
        yield keys.say(key, {"train.loss_type": loss})
    if loss in (TRLS[objective] if smoothed is None else smoothed):
        value = keys.number(smoothing)
        yield keys.same(smoothing, {"train.label_smoothing": value} if value else None)
    if "simpo_gamma" in known[str(loss)]:
        yield keys.say("simpo_gamma", {"train.simpo_gamma": keys.number("simpo_gamma")})


def cpo(keys: Keys) -> Says:
    yield from of_pairs(keys, "cpo")
    yield keys.say("cpo_alpha", {"train.cpo_alpha": keys.number("cpo_alpha")})
    yield from keys.follow(OF_CPO)


def kto(keys: Keys) -> Says:
    """State the loss of single answers, and its weights."""
    value = keys.value("loss_type") or "kto"
    every = value if isinstance(value, list) else [value]
    losses = OBJECTIVES["kto"].losses
    if len(every) != 1 or every[0] not in losses:
        shown = " + ".join(map(str, every))
        message = f"the loss {shown} has no counterpart: recipec's kto has {listing(losses)}"
        yield keys.refuse("loss_type", E1163, message, "loss_type: kto")
    elif every[0] != "kto":
        yield keys.say("loss_type", {"train.loss_type": every[0]})
    yield from weights(keys, "desirable_weight", "undesirable_weight")
    yield from keys.follow(OF_KTO)


def weights(keys: Keys, desirable: str, undesirable: str) -> Says:
    """State KTO's weights of desirable and undesirable answers, under the given keys."""
    for name, key in (("desirable_weight", desirable), ("undesirable_weight", undesirable)):
        value = keys.number(key)
        yield keys.same(key, {f"train.{name}": 1.0 if value is None else value})


def dpo(keys: Keys, smoothed: frozenset[str] | None = None) -> Says:
    yield from of_pairs(keys, "dpo", smoothed=smoothed)
    divergence = keys.text("f_divergence_type")
    if divergence not in (None, "reverse_kl", "FDivergenceType.REVERSE_KL"):
        message = (
            f"the divergence {divergence} has no counterpart: recipec's dpo uses the reverse KL divergence"
        )
        yield keys.refuse("f_divergence_type", E1163, message, "f_divergence_type: reverse_kl")
    yield from keys.follow(OF_DPO)


def preferences(keys: Keys, objective: str, smoothed: frozenset[str] | None = None) -> Says:
    """State the loss of an objective that compares answers, and its weights.

    Args:
        smoothed: the losses of dpo that read label_smoothing; None for TRL's.
    """
    if objective == "dpo":
        yield from dpo(keys, smoothed)
    elif objective == "cpo":
        yield from cpo(keys)
    elif objective == "kto":
        yield from kto(keys)
