"""TRL's command line (trl sft, trl dpo, and the script of orpo): the YAML of its --config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from compiler.port import known
from compiler.port.dialects import trl_data, trl_loss, trl_script
from compiler.port.keys import Keys, words
from compiler.port.ledger import Ledger
from compiler.port.meaning import adapters, models, quantization, sharding, trainer
from compiler.port.meaning.models import Named
from compiler.port.meaning.sharding import Launch
from compiler.port.meaning.trainer import Run

NAME = "trl"
TITLE = "TRL"
MARKS = words(
    """model_name_or_path dataset_name dataset_config dataset_train_split dataset_test_split use_peft
    attn_implementation max_length packing_strategy completion_only_loss assistant_only_loss
    use_bnb_nested_quant chat_template_path dataset_text_field padding_free lora_task_type model_revision beta
    loss_type precompute_ref_log_probs torch_dtype dataset_num_proc eos_token lora_modules_to_save
    accelerate_config disable_dropout shuffle_dataset reward_funcs num_generations max_completion_length
    desirable_weight undesirable_weight center_rewards_coefficient"""
)

SHIPPED = {"single_gpu": 1, **dict.fromkeys(("multi_gpu", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"), 8)}
"""The accelerate configs that come with TRL, by name, and their processes."""


def port(ledger: Ledger) -> None:
    """Says what became of every key.

    Raises:
        Refused: the script that the file is for cannot be told, or has no counterpart.
    """
    source = ledger.sources.main
    keys = Keys(ledger, source, TITLE)
    objective = trl_script.told(keys, ledger.script)
    keys.defaults = _defaults(objective)
    if objective != "sft":
        ledger.set("train.objective", objective, f"the keys are those of TRL's {objective} script")
    launch = _launch(keys)
    launch, taken = trainer.placement(keys, launch)
    model = _model(keys)
    run = Run(keys.flag("use_peft"), keys.number("learning_rate") or 0.0)
    _lora(keys, run, model)
    trl_data.speak(keys, objective, model)
    trl_loss.speak(keys, objective)
    trainer.batch(keys, launch)
    trainer.length(keys)
    trainer.optimizer(keys, run, taken)
    trainer.schedule(keys, run, taken)
    trainer.precision(keys, run, launch, _dtype(keys))
    trainer.order(keys)
    trainer.memory(keys, launch)
    trainer.bookkeeping(keys)
    _rest(keys)


def _defaults(objective: str) -> dict[str, Any]:
    sections = (objective, "script", "model", "mixture")
    return {**known.defaults("trl", *sections), "optim": "adamw_torch_fused", "loss_type": None}


def _launch(keys: Keys) -> Launch:
    """accelerate's settings: of its file, of one that TRL ships, and of the launcher's flags in the YAML."""
    ledger = keys.ledger
    launch = Launch()
    file = ledger.sources.others.get("accelerate")
    if file is not None:
        launch = sharding.accelerate(ledger, file, trainer.for_deepspeed(keys, ledger.devices or 1))
    name = keys.text("accelerate_config")
    if name in SHIPPED:
        launch = Launch(SHIPPED[name], mixed_precision="bf16").with_("fsdp" in name, "zero" in name)
        keys.same("accelerate_config", note=f"{SHIPPED[name]} processes; {sharding.MESH}")
    elif name is not None and file is None:
        keys.same(
            "accelerate_config", note="not among the files: name it on the command line, or give --devices"
        )
    keys.same("accelerate_config", note="read beside this file")
    if keys.given("num_processes") and (count := keys.integer("num_processes")) and count > 0:
        launch = replace(launch, processes=count)
        keys.same("num_processes", note=f"{count} processes, which multiply the rows of a step")
    for flag in known.keys("accelerate", "launch"):
        if flag not in ("gradient_accumulation_steps", "env"):
            keys.same(flag, note=sharding.MESH if flag.startswith("fsdp") else sharding.LAUNCHER)
    return launch


def _model(keys: Keys) -> Named | None:
    name = keys.text("model_name_or_path")
    named = None
    if name is None:
        keys.refuse(
            "model_name_or_path", "E1144", "the file names no model", "--set model_name_or_path=Qwen/Qwen3-8B"
        )
    else:
        named = models.resolve(name, keys.source.path.parent)
        if named.model is None:
            keys.refuse("model_name_or_path", named.code, named.error, named.help)
        keys.say("model_name_or_path", {"model.id": named.id}, named.note)
    revision = keys.text("model_revision")
    keys.same("model_revision", {"model.revision": revision} if revision not in (None, "main") else None, "")
    attention = keys.text("attn_implementation")
    if attention is not None and "flash" in attention:
        keys.same("attn_implementation", {"model.attention": "splash"}, "the TPU's fused kernel")
    keys.same("attn_implementation", note="the same attention, without a fused kernel")
    code = "code of the model's own is not run: the model is one that is known here"
    keys.passive(("trust_remote_code",), code)
    arguments = keys.mapping("model_init_kwargs")
    keys.unless("model_init_kwargs", (None, {}), f"not passed on: {', '.join(arguments)}")
    keys.learnt("router_aux_loss_coef", (None, 0.0), "no loss that balances the experts is added here")
    return named


def _dtype(keys: Keys) -> str:
    found = keys.choice("dtype", ("auto", "bfloat16", "float16", "float32")) or "float32"
    keys.passive(("dtype",), "with bf16 and fp16 it gives model.dtype")
    return found


def _lora(keys: Keys, run: Run, named: Named | None) -> None:
    four, eight = keys.flag("load_in_4bit"), keys.flag("load_in_8bit")
    details = ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage")
    if not run.lora:
        for key in ("load_in_4bit", "load_in_8bit"):
            if keys.flag(key):
                message = "full fine-tuning with quantised base: quantised weights cannot be trained"
                keys.refuse(key, "E1146", message, "use_peft: true, or remove the quantisation")
        ours = [key for key in known.keys("trl", "model") if key.startswith("lora_")]
        keys.passive(
            (*ours, "use_rslora", "use_dora", *details, "load_in_4bit", "load_in_8bit"), "use_peft is off"
        )
        keys.same("use_peft", {"lora": None}, "full fine-tuning")
        return
    keys.same("use_peft", note="the lora section")
    keys.say("lora_r", {"lora.rank": keys.integer("lora_r")})
    keys.say("lora_alpha", {"lora.alpha": keys.number("lora_alpha")})
    keys.same("use_rslora", {"lora.rslora": True} if keys.flag("use_rslora") else None, "alpha / sqrt(rank)")
    spec = keys.texts("lora_target_modules")
    model = named.model if named else None
    if isinstance(spec, list) and len(spec) == 1:
        spec = spec[0] if spec[0] == "all-linear" or any(sign in spec[0] for sign in "*^$|()[]\\") else spec
    if spec is None:
        spec = adapters.default_targets(model)
        keys.defaults = {**keys.defaults, "lora_target_modules": spec}
    if spec is None:
        message = "PEFT has no target modules of its own for this model"
        keys.refuse("lora_target_modules", "E1148", message, "--set lora_target_modules=all-linear")
    else:
        adapters.say_targets(keys, "lora_target_modules", model, spec)
    for key in ("lora_modules_to_save", "lora_target_parameters", "use_dora"):
        idle, note = adapters.FEATURES[key if key == "use_dora" else key.removeprefix("lora_")]
        keys.learnt(key, (*idle, []), note)
    keys.unless("lora_task_type", ("CAUSAL_LM",), "a language model is trained here")
    kind = keys.choice("bnb_4bit_quant_type", ("nf4", "fp4")) or "nf4"
    made = quantization.translate(
        4 if four else 8 if eight else None, kind, keys.flag("use_bnb_nested_quant")
    )
    if made.value is not None:
        keys.say("load_in_4bit" if four else "load_in_8bit", {"lora.quantize": made.value}, made.note)
        keys.ledger.set("lora.dtype", "bfloat16", "TRL trains bfloat16 adapters on a quantised base")
    else:
        keys.ledger.set("lora.dtype", "float32", "PEFT keeps adapters in float32")
    keys.passive(
        ("load_in_4bit", "load_in_8bit", *details), "part of lora.quantize" if made.value else "not quantised"
    )


def _rest(keys: Keys) -> None:
    keys.passive(("env",), "variables of the environment, which the scripts here do not read")
    keys.passive(("ignore_bias_buffers", "dataset_num_proc"), "it bears on no number")
    keys.unless(
        "activation_offloading",
        (False,),
        "activations stay on the devices here: more memory, the same numbers",
    )
