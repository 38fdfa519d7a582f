"""The arguments that a script parses with HfArgumentParser or TrlParser, from the file that they are in.

The parser makes an object of each of its classes, with the file's values. A class of the script has its own
fields. The library's classes have the keys of TRL's command line and of the Trainer.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from recipec.port.keys import defaults_of, keys_of, words
from recipec.port.script_values import Arg, Made
from recipec.port.settle import NAMES
from recipec.port.source import Source
from recipec.spec.diagnostics import Span

PARSERS = re.compile(r"(Hf|H4)ArgumentParser|TrlParser")
OBJECTIVES = ("sft", "dpo", "orpo", "cpo", "kto", "grpo", "rloo", "gkd")
SECTIONS: Mapping[str, tuple[str, str]] = {
    **{f"{name.upper()}Config": ("trl", name) for name in OBJECTIVES},
    "UnslothTrainingArguments": ("trl", "sft"),
    "TrainingArguments": ("trainer", "training_arguments"),
    "Seq2SeqTrainingArguments": ("trainer", "training_arguments"),
    "ModelConfig": ("trl", "model"),
    "ScriptArguments": ("trl", "script"),
    "DatasetMixtureConfig": ("trl", "mixture"),
}
"""The libraries' classes of arguments, with their tool and section in data/dialects.json."""
OLDER: Mapping[str, frozenset[str]] = {
    "ModelConfig": words("trust_remote_code torch_dtype use_flash_attention_2"),
    "ScriptArguments": words("dataset_mixture dataset_text_field gradient_checkpointing_use_reentrant"),
}
"""Keys that a class had in earlier versions of TRL."""
OF_A_RUN = words(
    """overwrite_output_dir chat_template max_prompt_length max_completion_length max_target_length
    generate_during_eval is_encoder_decoder padding_value label_pad_token_id model_adapter_name
    ref_adapter_name force_use_ref_model dataset_kwargs dataset_batch_size num_of_sequences chars_per_token"""
)
"""Keys that a trainer's arguments had in earlier versions, or have in alignment-handbook."""
HELPERS, MODULES = ("get_dataset", "get_model", "get_tokenizer"), ("alignment", "open_r1")
"""Functions of alignment-handbook and open-r1 that take the parsed arguments, and the packages with them."""
READ, UNREAD = "an argument of the script, which uses it", "an argument that the script does not use"
REPLACED = "the script uses another value in its place"
NOWHERE = "none of the script's classes of arguments has it"


@dataclass
class Given:
    """The file of a script's arguments.

    Attributes:
        source: the file.
        args: its keys, each with its place in the file.
        notes: by key, what became of it: NOWHERE until a class of the script has it.
        used: whether the script parses arguments.
        reads: names of the attributes that the script reads, also in functions that are not followed.
    """

    source: Source
    args: dict[str, Arg] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    used: bool = False
    reads: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        top = self.source.top()
        for name, value in self.source.data.items():
            key = str(name)
            node = placed(value, self.source.span(key) or top)
            self.args[key] = Arg(deepcopy(value), node, placed(key, self.source.keys.get(key) or top))
            self.notes[key] = NOWHERE
        if "env" in self.notes:
            self.notes["env"] = "environment variables, which recipec's scripts do not read"

    def parsed(self, kind: str) -> Made:
        """Return what the parser makes of a library's class. A class that is not known may have any key."""
        instance = Made(kind, {}, ast.Constant(kind, lineno=1, col_offset=0))
        return self.filled(instance, of_class(kind) or frozenset(self.args))

    def filled(self, instance: Made, names: frozenset[str]) -> Made:
        """Give an object of a class the file's values of its fields."""
        self.used = True
        for key in self.args:
            if key in names or current(key) in names:
                instance.args[key] = self.args[key]
                if self.notes[key] == NOWHERE:
                    self.notes[key] = READ if key in self.reads else UNREAD
        instance.told["parsed"] = Arg(True, ast.Constant(True, lineno=1, col_offset=0), ast.Constant(True))
        return instance

    def read(self, name: str, arg: Arg) -> None:
        """Note that the script reads a value of the file."""
        if self.args.get(name) is arg:
            self.notes[name] = READ


def placed(value: Any, span: Span) -> ast.expr:
    """Return an expression for a value that another file contains."""
    node = ast.Constant(value, lineno=1, col_offset=0, end_lineno=1, end_col_offset=0)
    node.place = span  # type: ignore[attr-defined]
    return node


def current(key: str) -> str:
    """Return the current name of a key of TRL or the Trainer."""
    return NAMES["trl"].get(key, key)


@functools.cache
def of_class(kind: str) -> frozenset[str]:
    """Return the keys of a library's class, and an empty set for an unknown class."""
    if kind not in SECTIONS:
        return frozenset()
    tool, section = SECTIONS[kind]
    trains = section in OBJECTIVES or tool == "trainer"
    return frozenset(keys_of(tool, section)) | OLDER.get(kind, frozenset()) | (OF_A_RUN if trains else set())


def default(instance: Made, name: str) -> Any:
    """Return the default of a parsed argument.

    Raises:
        LookupError: it is not known.
    """
    tool, section = SECTIONS[instance.kind]
    if "parsed" not in instance.told or name not in of_class(instance.kind):
        raise LookupError(name)
    return defaults_of(tool, section).get(current(name))


QUANTIZED = words("load_in_4bit load_in_8bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage")


def of_model(instance: Made, node: ast.Call, name: str, file_arguments: Given) -> Made | None:
    """Return what TRL's get_peft_config and get_quantization_config make of a ModelConfig."""
    defaults = defaults_of("trl", "model")

    def value(key: str) -> Any:
        if key in instance.args:
            file_arguments.read(key, instance.args[key])
        return instance.args[key].value if key in instance.args else defaults.get(key)

    quantized = name == "get_quantization_config"
    if not (value("load_in_4bit") or value("load_in_8bit") if quantized else value("use_peft")):
        return None
    lora = {key for key in defaults if key.startswith("lora_")} | {"use_rslora", "use_dora"}
    taken = [key for key in defaults if key in (QUANTIZED if quantized else lora)]
    args = {key: instance.args.get(key) or Arg(defaults[key], node, node) for key in taken}
    return Made("bnb" if quantized else "lora", args, node)
