"""Settle a file: apply `--set`, rename keys to their current names, and resolve references."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from recipec.port.ledger import Ledger, prefixes
from recipec.port.meaning.datasets import elsewhere
from recipec.port.read import E1106, JINJA_HELP, Tree, conceal, parse_yaml
from recipec.port.source import MISSING, Source, Sources, join, parts
from recipec.spec.codes import Code
from recipec.spec.core_schema import flow
from recipec.spec.diagnostics import Diagnostic, Span
from recipec.spec.overrides import E0030, E0031
from recipec.spec.secrets import E0702
from recipec.spec.yaml_document import Refused

_ARGUMENT = re.compile(r"([A-Za-z_][\w.\[\]-]*)=(.*)")


def overridden(sources: Sources, arguments: Sequence[str]) -> tuple[Sources, list[Diagnostic]]:
    """Apply the `--set` arguments to the main file."""
    problems: list[Diagnostic] = []
    main = sources.main
    for number, argument in enumerate(arguments, 1):
        try:
            main = _applied(main, argument, number)
        except Refused as refused:
            problems.append(refused.diagnostic)
    return replace(sources, main=main), problems


def _applied(main: Source, argument: str, number: int) -> Source:
    span = Span("--set", number, 1, conceal(argument), max(1, len(argument)))
    match = _ARGUMENT.fullmatch(argument)
    if match is None:
        help = "--set learning_rate=1e-4"
        raise Refused(Diagnostic(E0030, "a --set argument is KEY=VALUE", "", help, span))
    key, text = conceal(match[1]), match[2].strip()
    tree = Tree(text, "--set")
    value = None if text in ("", "null", "~") else parse_yaml(tree)
    data = deepcopy(main.data)
    put(
        data,
        parts(key),
        value,
        Diagnostic(E0031, f"`{key}` is not inside a section", key, "set its section", span),
    )
    below = (f"{key}.", f"{key}[")
    spans = {known: place for known, place in main.spans.items() if not known.startswith(below)}
    secrets = {known: what for known, what in main.secrets.items() if not f"{known}.".startswith(below)}
    for path, what in tree.secrets.items():
        secrets[f"{key}{path}" if path[:1] in ("", "[") else join(key, path)] = what
    unknown, shell = (
        {known: why for known, why in places.items() if not f"{known}.".startswith(below)}
        for places in (main.unknown, main.shell)
    )
    keys = {**main.keys, key: span}
    spans = {**spans, key: span}
    return replace(main, data=data, spans=spans, keys=keys, secrets=secrets, unknown=unknown, shell=shell)


def put(node: Any, way: Sequence[str | int], value: Any, nowhere: Diagnostic) -> None:
    """Set the value at a path below a node, and create the missing sections on the way.

    Raises:
        Refused: with `nowhere`, if the path leads through something that is not a section.
    """
    first, *rest = way
    if isinstance(first, int):
        if not isinstance(node, list) or first >= len(node):
            raise Refused(nowhere)
    elif not isinstance(node, dict):
        raise Refused(nowhere)
    elif rest and node.get(first) is None:
        node[first] = {}
    if rest:
        put(node[first], rest, value, nowhere)
    else:
        node[first] = value


_TRAINER = {
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "adafactor": "optim",
}

NAMES: Mapping[str, Mapping[str, str]] = {
    "trainer": _TRAINER,
    "trl": {
        **_TRAINER,
        "max_seq_length": "max_length",
        "torch_dtype": "dtype",
        "use_flash_attention_2": "attn_implementation",
        "use_liger": "use_liger_kernel",
        "use_liger_loss": "use_liger_kernel",
        "dataset_train_name": "dataset_train_split",
        "dataset_test_name": "dataset_test_split",
        "peft_lora_r": "lora_r",
        "peft_lora_alpha": "lora_alpha",
    },
    "llamafactory": {
        **_TRAINER,
        "prompt_template": "template",
        "sft_packing": "packing",
        "train_last_turn_only": "mask_history",
        "dpo_beta": "pref_beta",
        "orpo_beta": "pref_beta",
        "kto_beta": "pref_beta",
        "dpo_loss": "pref_loss",
        "dpo_ftx": "pref_ftx",
        "kto_ftx": "pref_ftx",
        "dpo_ref_model": "ref_model",
        "ref_model_checkpoint": "ref_model_adapters",
        "dev_ratio": "val_size",
        "lora_lr_ratio": "loraplus_lr_ratio",
        "neft_alpha": "neftune_noise_alpha",
        "cache_path": "tokenized_path",
        "checkpoint_dir": "adapter_name_or_path",
        "name_module_trainable": "freeze_trainable_modules",
        "num_layer_trainable": "freeze_trainable_layers",
        "hf_auth_token": "hf_hub_token",
        "new_special_tokens": "add_special_tokens",
        "swanlab_experiment_name": "swanlab_run_name",
    },
    "open_instruct": {
        "add_r1_style_format_reward": "apply_r1_style_format_reward",
        "chat_template": "chat_template_name",
        "number_samples_per_prompt": "num_samples_per_prompt_rollout",
        "dataset_train_splits": "dataset_mixer_list_splits",
        "penalty_reward_value": "non_stop_penalty_value",
    },
    "swift": {**_TRAINER, "train_type": "tuner_type", "custom_register_path": "external_plugins"},
    "axolotl": {
        "evaluation_strategy": "eval_strategy",
        "noisy_embedding_alpha": "neftune_noise_alpha",
        "sequence_parallel_degree": "context_parallel_size",
        "dataset_processes": "dataset_num_proc",
        "eval_table_max_new_tokens": "eval_max_new_tokens",
    },
}
"""By dialect: the current name of each older name."""

VALUES = {
    "use_flash_attention_2": {True: "flash_attention_2", False: "sdpa"},
    "adafactor": {True: "adafactor"},
}
"""Older names that were switches, with the current value of each switch value. Other values have no
newer name."""


def renamed(source: Source, dialect: str) -> Source:
    """Return a file with current key names. An older name stays if its newer name is in the file too."""
    if not isinstance(source.data, dict):
        return source
    names: dict[str, str] = {}
    data: dict[str, Any] = {}
    for key, value in source.data.items():
        new = NAMES.get(dialect, {}).get(key) if _today(key, value) is not MISSING else None
        if new and new not in source.data and new not in data:  # the first older name wins
            names[key], key, value = new, new, _today(key, value)
        data[key] = value
    if not names:
        return source

    def moved(places: Mapping[str, Any]) -> dict[str, Any]:
        return {_moved(path, names): place for path, place in places.items()}

    older = {new: old for old, new in names.items()}
    return replace(
        source,
        data=data,
        spans=moved(source.spans),
        keys=moved(source.keys),
        secrets=moved(source.secrets),
        unknown=moved(source.unknown),
        shell=moved(source.shell),
        older=older,
    )


W1194 = Code(
    "W1194",
    "old and new name of a key",
    cause="The file has a key by its old name and by its new name, with different values. Which one "
    "is used depends on the tool's version. The port uses the new name's value.",
    cure="Remove one of the two.",
)


def older_beside(ledger: Ledger, dialect: str) -> Iterator[Diagnostic]:
    """Record that a newer name wins over its older name in the same file, and warn if their values differ."""
    source = ledger.sources.main
    for old, new in NAMES.get(dialect, {}).items():
        value = _today(old, source.get(old))
        if value is MISSING or not source.has(new):
            continue
        stands = source.older.get(new, new)
        if value is None or value == source.get(new):
            says = "has no effect, because it is null" if value is None else f"has the same value as {stands}"
            ledger.exact(source, old, note=f"an older name of {new}, which {says}")
            continue
        note = f"an older name of {new}; the value of {stands} applies"
        ledger.unsupported(source, old, note)
        message = (
            f"`{old}` is an older name of `{new}`, and recipec takes `{stands}: {flow(source.get(new))}`"
        )
        yield Diagnostic(W1194, message, old, f"remove `{old}`, or `{stands}`", source.span(old))


def _today(key: str, value: Any) -> Any:
    """Return the current value for the value of an older name, or MISSING if there is none."""
    if key not in VALUES:
        return value
    return VALUES[key].get(value, MISSING) if isinstance(value, bool) else MISSING


def _moved(path: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        if path == old or path.startswith((f"{old}.", f"{old}[")):
            return new + path[len(old) :]
    return path


_JINJA = re.compile(r"\{\{|\{%")
_BRACES = re.compile(r"\$\{([^{}]*)\}")
_VARIABLE = re.compile(r"\$\{[^{}]*\}?|(?<![\w$\\])\$[A-Z][A-Z0-9_]+")
_TEMPLATES = re.compile(r"template|jinja|format|prompt|regex|pattern", re.IGNORECASE)
"""Matches keys whose values may contain Jinja or `$` literally."""

SECRET_HELP = "write what the key is for instead of the secret; revoke the token if the file was shared"

MOST_STEPS = 100
"""The most references that are followed for one value."""


@dataclass(frozen=True)
class Refusal:
    """A value that cannot be read."""

    key: str
    value: Any
    code: Code
    message: str
    help: str


@dataclass(frozen=True)
class Settled:
    """A file whose references are resolved.

    Attributes:
        refusals: the values that were removed from the file.
        used: the keys that other values refer to.
    """

    source: Source
    refusals: list[Refusal]
    used: frozenset[str]


def settle(source: Source, interpolates: bool, kept: Collection[str] = ()) -> Settled:
    """Resolve the references of a file. Remove values that cannot be resolved, and values with tokens."""
    settler = _Settler(source, interpolates, kept)
    data = settler.node(source.data, "")
    return Settled(replace(source, data=data), settler.refusals, frozenset(settler.used))


class _Unreadable(Exception):
    def __init__(self, code: Code, message: str, help: str) -> None:
        super().__init__(message)
        self.code = code
        self.help = help


E1108 = Code(
    "E1108",
    "reference that cannot be followed",
    cause="A `${key}` of OmegaConf names a key that is not in the file, or refers to itself.",
    cure="Write the value instead.",
)

E1174 = Code(
    "E1174",
    "value known only at run time",
    cause="The port reads a script without running it. The value depends on an input, the "
    "environment, a download or a condition.",
    cure="Write the value instead, or give it with `--set KEY=VALUE`.",
)


@dataclass
class _Settler:
    source: Source
    interpolates: bool
    kept: Collection[str] = ()
    refusals: list[Refusal] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def node(self, node: Any, path: str) -> Any:
        """Return the value with its references resolved, or MISSING if it is refused."""
        if isinstance(node, dict):
            mapping = {key: self.node(value, join(path, key)) for key, value in node.items()}
            return {key: value for key, value in mapping.items() if value is not MISSING}
        if isinstance(node, list):
            kept = [self.node(item, f"{path}[{index}]") for index, item in enumerate(node)]
            return [item for item in kept if item is not MISSING]
        if not isinstance(node, str):
            return node
        try:
            return self.text(node, path)
        except _Unreadable as error:
            self.refusals.append(Refusal(path, node, error.code, str(error), error.help))
            return node if path in self.kept else MISSING

    def text(self, text: str, path: str) -> Any:
        if why := self.source.unknown.get(path):
            message = f"`{path}` depends on {why}, which is known only when the script runs"
            objective = self.source.script.objective if self.source.script else "sft"
            help = f"give its value: --set {path}=VALUE"
            raise _Unreadable(E1174, message, elsewhere(path, objective) if path == "dataset_name" else help)
        if secret := self.source.secrets.get(path):
            raise _Unreadable(E0702, f"`{path}` looks like {secret}", SECRET_HELP)
        if _TEMPLATES.search(path) or self.source.script:
            return text
        if sign := _JINJA.search(text):
            message = (
                f"`{path}` is a Jinja template: something else fills in the value that `{sign[0]}` starts"
            )
            raise _Unreadable(E1106, message, JINJA_HELP)
        value = self.resolved(text, path, 0) if self.interpolates else text
        if isinstance(value, str) and (variable := _VARIABLE.search(value)):
            raise _environment(path, variable[0])
        return value

    def resolved(self, text: str, path: str, steps: int) -> Any:
        """Fill in each `${key}` of a text. If the whole text is one reference, return the value itself.

        On a command line the shell replaces such names before the tool reads them.
        """
        if any(key in self.source.shell for key in prefixes(path)):
            return text
        if steps > MOST_STEPS:
            raise _Unreadable(E1108, f"the references of `{path}` form a circle", "write the value out")
        whole = _BRACES.fullmatch(text)
        if whole:
            return deepcopy(self.followed(whole[1], path, steps))
        for match in _BRACES.finditer(text):
            value = self.followed(match[1], path, steps)
            if isinstance(value, dict | list):
                message = f"`{match[0]}` in `{path}` is a section, and a text needs a value"
                raise _Unreadable(E1108, message, "write the value out")
            text = text.replace(match[0], _shown(value), 1)
        return text

    def followed(self, name: str, path: str, steps: int) -> Any:
        """Return the value that `${name}` refers to, in the value at `path`."""
        if ":" in name:
            raise _environment(path, f"${{{name}}}")
        target = _absolute(name.strip(), path)
        value = self.source.get(target)
        if value is MISSING:
            message = f"`${{{name}}}` in `{path}` names a key that the file does not have"
            raise _Unreadable(E1108, message, "write the value out")
        self.used.add(target)
        return self.inner(value, target, steps + 1)

    def inner(self, node: Any, path: str, steps: int) -> Any:
        """Resolve the references within a value that another value refers to."""
        if isinstance(node, dict):
            return {key: self.inner(value, join(path, key), steps) for key, value in node.items()}
        if isinstance(node, list):
            return [self.inner(item, f"{path}[{index}]", steps) for index, item in enumerate(node)]
        return self.resolved(node, path, steps) if isinstance(node, str) else node


def _absolute(name: str, path: str) -> str:
    """Make a relative OmegaConf name absolute: `.b` is a sibling, `..b` is a sibling of the section."""
    ups = len(name) - len(name.lstrip("."))
    if not ups:
        return name
    sections = path.split(".")[: -ups or None]
    return ".".join([*sections, name.lstrip(".")])


def _shown(value: Any) -> str:
    """Write a value inside a text as OmegaConf does."""
    return str(value)


E1107 = Code(
    "E1107",
    "value from the environment",
    cause="A value refers to an environment variable (`${NAME}`, `${oc.env:NAME}`), which is unknown here.",
    cure="Write the value instead.",
)


def _environment(path: str, reference: str) -> _Unreadable:
    where = f"takes `{reference}` from the environment, which recipec does not know"
    if run := re.fullmatch(r"\$\{(\(.*|\d|[@*])\}", reference):
        where = f"contains `${run[1]}`, which is known only when the script runs"
    return _Unreadable(
        E1107,
        f"`{path}` {where}",
        f"write the value instead: {path.rpartition('.')[2]}: ...",
    )
