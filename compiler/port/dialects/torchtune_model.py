"""torchtune's model builders, checkpointers and tokenizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from compiler.catalog import Model, original_of
from compiler.port import known
from compiler.port.keys import Keys
from compiler.port.meaning import adapters, models, quantization
from compiler.wording import listing

LLAMA, QWEN, QWEN3 = "meta-llama/Llama", "Qwen/Qwen2.5", "Qwen/Qwen3"

BUILDERS: Mapping[str, tuple[str, ...]] = {
    "llama3.llama3_8b": ("meta-llama/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B-Instruct"),
    "llama3_1.llama3_1_8b": (f"{LLAMA}-3.1-8B", f"{LLAMA}-3.1-8B-Instruct"),
    "llama3_1.llama3_1_70b": (f"{LLAMA}-3.1-70B", f"{LLAMA}-3.1-70B-Instruct"),
    "llama3_2.llama3_2_1b": (f"{LLAMA}-3.2-1B", f"{LLAMA}-3.2-1B-Instruct"),
    "llama3_2.llama3_2_3b": (f"{LLAMA}-3.2-3B", f"{LLAMA}-3.2-3B-Instruct"),
    "llama3_3.llama3_3_70b": (f"{LLAMA}-3.3-70B-Instruct",),
    "gemma2.gemma2_2b": ("google/gemma-2-2b", "google/gemma-2-2b-it"),
    "gemma2.gemma2_9b": ("google/gemma-2-9b", "google/gemma-2-9b-it"),
    "gemma2.gemma2_27b": ("google/gemma-2-27b", "google/gemma-2-27b-it"),
    "qwen2_5.qwen2_5_0_5b": (f"{QWEN}-0.5B", f"{QWEN}-0.5B-Instruct"),
    "qwen2_5.qwen2_5_3b": (f"{QWEN}-3B", f"{QWEN}-3B-Instruct"),
    **{
        f"qwen2_5.qwen2_5_{n.replace('.', '_')}b_base": (f"{QWEN}-{n}B",)
        for n in ("1.5", "7", "14", "32", "72")
    },
    **{
        f"qwen2_5.qwen2_5_{n.replace('.', '_')}b_instruct": (f"{QWEN}-{n}B-Instruct",)
        for n in ("1.5", "7", "14", "32", "72")
    },
    **{
        f"qwen3.qwen3_{n.replace('.', '_')}b_{kind}": (f"{QWEN3}-{n}B{end}",)
        for n in ("0.6", "1.7", "4", "8", "14")
        for kind, end in (("base", "-Base"), ("instruct", ""))
    },
    "qwen3.qwen3_32b": (f"{QWEN3}-32B",),
}
"""Builders without lora_ and qlora_, and the checkpoints that they are for."""

NAMES = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
"""torchtune's projections of attention, and the recipe's."""


@dataclass(frozen=True)
class Built:
    """The model: None when it is not known; and whether adapters are trained on it."""

    model: Model | None
    lora: bool


def speak(keys: Keys) -> Built:
    """Says what becomes of the model, its adapters, the checkpointer and the tokenizer's files."""
    section = keys.below("model")
    component = section.text("_component_")
    builder = (component or "").removeprefix("torchtune.models.")
    package, _, function = builder.rpartition(".")
    lora = function.startswith(("lora_", "qlora_"))
    plain = f"{package}.{function.removeprefix('q').removeprefix('lora_') if lora else function}"
    name = f"torchtune.models.{builder}"
    if name in known.tools()["torchtune"]["sections"]:
        section.defaults = known.defaults("torchtune", name)
    model = _model(keys, section, component, plain)
    if lora:
        _lora(section)
    else:
        keys.ledger.set("lora", None, "full fine-tuning: the builder's name does not begin with lora_")
        if section.flag("quantize_base"):
            message = "full fine-tuning with quantised base: quantised weights cannot be trained"
            section.refuse("quantize_base", "E1146", message, "a builder whose name begins with qlora_")
    section.passive(
        ("tie_word_embeddings", "quantize_base", "attn_dropout", "max_seq_len"), "the model's own"
    )
    keys.passive(("checkpointer",), "where the checkpoint lies: `model.id` names it, or --model of train.py")
    return Built(model, lora)


def _model(keys: Keys, section: Keys, component: str | None, plain: str) -> Model | None:
    ids = BUILDERS.get(plain)
    if component is None:
        section.refuse(
            "_component_",
            "E1144",
            "the file names no model",
            "_component_: torchtune.models.llama3_2.lora_llama3_2_1b",
        )
        return None
    if any(part in component for part in ("vision", "clip", "flux", "t5")):
        message = f"{component} is no model of text alone"
        section.refuse("_component_", "E1150", message, "port the configuration of a text model")
        return None
    if ids is None:
        builders = listing(sorted({name.partition(".")[0] for name in BUILDERS}))
        message = f"the model of {component} is not in the catalogue"
        section.refuse("_component_", "E0801", message, f"builders that are known: of {builders}")
        return None
    directory = keys.source.get("checkpointer.checkpoint_dir", None)
    folder = Path(str(directory)).name if isinstance(directory, str) else ""
    named = original_of(folder) if folder else None
    if named is not None and named not in ids:
        message = f"the builder is of {ids[0]}, and the checkpoint's folder of {named}"
        section.refuse(
            "_component_", "E1145", message, "make the builder and checkpointer.checkpoint_dir agree"
        )
    chosen = named or ids[0]
    if named is not None:
        section.same("_component_", {"model.id": chosen}, f"the folder of the checkpoint is {folder}")
    else:
        section.say("_component_", {"model.id": chosen}, "by the builder, which is of tuned checkpoints too")
    return models.resolve(chosen, keys.source.path.parent).model


def _lora(keys: Keys) -> None:
    given = keys.texts("lora_attn_modules")
    modules = [given] if isinstance(given, str) else given or []
    targets = [NAMES[module] for module in NAMES if module in modules]
    unknown = [module for module in modules if module not in NAMES]
    if unknown:
        help = "lora_attn_modules: [q_proj, v_proj, output_proj]"
        keys.refuse("lora_attn_modules", "E1164", f"{listing(unknown)} is no projection of attention", help)
    if keys.flag("apply_lora_to_mlp"):
        targets += ["gate_proj", "up_proj", "down_proj"]
    if not targets:
        keys.refuse(
            "lora_attn_modules",
            "E1148",
            "no projection carries an adapter",
            "lora_attn_modules: [q_proj, v_proj]",
        )
    made = {"lora.targets": targets}
    keys.same("lora_attn_modules", made if targets else None, "output_proj is o_proj")
    keys.say("apply_lora_to_mlp", made if targets else None)
    adapters.say_head(keys, "apply_lora_to_output")
    keys.say("lora_rank", {"lora.rank": keys.integer("lora_rank")})
    keys.say("lora_alpha", {"lora.alpha": keys.number("lora_alpha")})
    keys.say("lora_dropout", {"lora.dropout": keys.number("lora_dropout")})
    keys.learnt("use_dora", *adapters.FEATURES["use_dora"])
    keys.ledger.set("lora.init", "peft", "A uniform with the bound 1/sqrt(fan_in), B zero, as there")
    if keys.flag("quantize_base"):
        value = quantization.translate(4).value
        keys.say("quantize_base", {"lora.quantize": value}, quantization.NESTED)
