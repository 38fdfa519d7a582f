"""Axolotl's YAML (0.19)."""

from __future__ import annotations

from compiler.catalog import Model
from compiler.port import known
from compiler.port.dialects import axolotl_data, axolotl_lora, axolotl_train
from compiler.port.dialects import axolotl_keys as tables
from compiler.port.keys import Keys
from compiler.port.ledger import Ledger
from compiler.port.meaning import models, results
from compiler.wording import flow, listing

NAME = "axolotl"
TITLE = "Axolotl"
MARKS = [
    "base_model",
    "sequence_len",
    "sample_packing",
    "adapter",
    "lora_target_linear",
    "val_set_size",
    "micro_batch_size",
    "num_epochs",
    "lr_scheduler",
    "evals_per_epoch",
    "saves_per_epoch",
    "datasets",
    "dataset_prepared_path",
    "chat_template",
    "flash_attention",
    "load_in_4bit",
    "load_in_8bit",
    "rl",
    "eot_tokens",
    "base_model_config",
    "bnb_config_kwargs",
    "pad_to_sequence_len",
]

OFF: tuple[object, ...] = (None, False, 0, 0.0, "", "none", [], {})
"""Values at which a feature does nothing."""

KNOWN_PLUGINS = {
    "CutCrossEntropyPlugin": "",
    "LigerPlugin": "",
    "KernelsPlugin": "",
    "ExpertParallelPlugin": "",
    "LMEvalPlugin": "evaluate.tasks names tasks for the server",
    "SwanLabPlugin": "",
}
SAME_KERNELS = "the same arithmetic in fused kernels, or a log"


def port(ledger: Ledger) -> None:
    """Says of every key what became of it."""
    keys = Keys(ledger, ledger.sources.main, TITLE, known.defaults(NAME, "config"))
    objective = _objective(keys)
    _refused(keys)
    model = _model(keys)
    axolotl_lora.port(keys, model)
    axolotl_data.port(keys, model, objective)
    axolotl_train.port(keys, model)
    _plugins(keys)
    _tokens(keys)
    results.directory(keys, "output_dir")
    project = keys.text("wandb_project")
    on = project and keys.value("wandb_mode") != "disabled"
    keys.same("wandb_project", {results.PROJECT: project} if on else None, "" if on else "off")
    _tables(keys)


def _model(keys: Keys) -> Model | None:
    name = keys.text("base_model")
    if name is None:
        keys.refuse("base_model", "E1144", "`base_model` is missing", "base_model: google/gemma-4-31B-it")
        return None
    found = models.resolve(name, keys.source.path.parent)
    keys.say("base_model", {"model.id": found.id}, found.note)
    revision = keys.text("revision_of_model") or keys.text("model_revision")
    for key in ("revision_of_model", "model_revision"):
        keys.same(key, {"model.revision": revision} if revision and not found.note else None)
    tokenizer = keys.text("tokenizer_config")
    keys.same("tokenizer_config", {"model.tokenizer": tokenizer} if tokenizer and tokenizer != name else None)
    return found.model


def _objective(keys: Keys) -> str:
    """What is learnt, with the keys that only preferences read."""
    kind = keys.text("rl")
    if kind not in (None, "dpo", "orpo"):
        message = f"`rl: {kind}` is another kind of training: recipes have sft, dpo and orpo"
        keys.refuse("rl", "E1149", message, "rl: dpo, or no rl for supervised fine-tuning")
        kind = None
    keys.say("rl", {"train.objective": kind} if kind else {})
    beta = next((n for n in ("trl.beta", "rl_beta", "dpo_beta", "orpo_alpha") if keys.given(n)), None)
    if kind is None:
        for name in ("rl_beta", "dpo_beta", "orpo_alpha", "trl", "dpo_label_smoothing", "dpo_loss_type"):
            keys.same(name, note="without rl it says nothing")
        keys.passive(("dpo_use_weighting", "precompute_ref_log_probs"), "without rl it says nothing")
        return "sft"
    value = keys.number(beta) if beta else None
    for name in ("trl.beta", "rl_beta", "dpo_beta", "orpo_alpha"):
        if name == beta:
            keys.same(name, {"train.beta": value})
        else:
            keys.same(name, note=f"{beta} holds" if beta else "")
    if beta is None:
        keys.default("rl_beta", 0.1, {"train.beta": 0.1}, "TRL's default")
    smoothing = keys.number("dpo_label_smoothing")
    smooth = smoothing if kind == "dpo" else None
    keys.same("dpo_label_smoothing", {"train.label_smoothing": smooth} if smooth else None)
    loss = keys.value("dpo_loss_type")
    if loss not in (None, "sigmoid", ["sigmoid"]):
        message = f"the preference loss {flow(loss)} has no counterpart: dpo here is the sigmoid loss"
        keys.refuse("dpo_loss_type", "E1163", message, "dpo_loss_type: [sigmoid]")
    keys.same("dpo_loss_type", note="dpo's own loss")
    keys.learnt("dpo_use_weighting", (False,), "preferences count alike here")
    keys.passive(("precompute_ref_log_probs",), "when the reference is computed, not what it is")
    below = keys.below("trl")
    for name in keys.mapping("trl"):
        below.passive((name,), "a setting of reinforcement learning, which this is not")
    return kind


def _refused(keys: Keys) -> None:
    for name, why in tables.REFUSED.items():
        if keys.given(name) and keys.value(name) is not False:
            help = "port the supervised stage: a config with datasets and no such key"
            keys.refuse(name, "E1149", f"`{name}` makes another kind of run: {why}", help)
        keys.same(name, note="off")
    for name in tables.VISION:
        if keys.given(name):
            message = f"`{name}` is for images or sound, and the models here read text"
            keys.refuse(name, "E1150", message, "train on text: leave it out, with data sets of text")
        keys.same(name)
    keys.passive(("freeze_mm_modules",), "the vision tower is not part of the model here")


def _plugins(keys: Keys) -> None:
    given = keys.value("plugins")
    names = [str(name).rpartition(".")[2] for name in given] if isinstance(given, list) else []
    lost = [name for name in names if name not in KNOWN_PLUGINS]
    if lost:
        keys.learnt("plugins", (), f"what {listing(lost)} changes in the run is not done here")
    keys.same("plugins", note=SAME_KERNELS)


def _tokens(keys: Keys) -> None:
    """Special tokens: padding is masked; others would be other text."""
    given = keys.mapping("special_tokens")
    below = keys.below("special_tokens")
    for name in given:
        if name == "pad_token":
            below.same(name, note="padding is neither trained on nor attended to")
        elif name in ("bos_token", "eos_token", "unk_token"):
            below.unless(name, (), f"the tokenizer keeps its own {name}: change it in a copy of it")
        else:
            below.unless(name, ([],), "no tokens are added to the tokenizer here")
    if not given:
        keys.same("special_tokens")


def _tables(keys: Keys) -> None:
    if keys.value("expert_parallel_size") == 1:
        keys.same("expert_parallel_size", note="off")
    for name, why in tables.LEARNT.items():
        keys.learnt(name, OFF, why)
    for name, why in tables.FEATURES.items():
        keys.unless(name, OFF, why)
    for note, names in tables.IRRELEVANT.items():
        keys.passive(names.split(), note)
    for switch, names in tables.SETTINGS.items():
        on = keys.given(switch) and keys.value(switch) not in OFF
        for name in names.split():
            if on:
                keys.unless(name, (), f"a setting of {switch} that there is not here")
            else:
                keys.same(name, note=f"without {switch} it says nothing")
    for why, names in tables.LOST.items():
        for name in names.split():
            keys.unless(name, OFF, why)
