"""Recognize the tool that the files belong to, the role of each file, and keys that no tool knows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from recipec.compiler.wording import listing
from recipec.port import dialects
from recipec.port.dialects import Module
from recipec.port.keys import tools, words
from recipec.port.ledger import Ledger
from recipec.port.refusals import W1114
from recipec.port.source import Source, Sources
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic, Span, has_errors

NEARLY = 0.9
"""The least similarity between a key and a mark for the key to count as a misspelling."""


@dataclass(frozen=True)
class Role:
    """A kind of file that accompanies a tool's own config.

    Attributes:
        title: the name of the kind, for messages.
        marks: keys by which the kind is recognized.
        half: what the file says, and what is missing without the run's own config.
        help: what to give in addition.
    """

    title: str
    marks: frozenset[str]
    half: str
    help: str


ROLES = {
    "accelerate": Role(
        "an accelerate config",
        words(
            "compute_environment distributed_type downcast_bf16 fsdp_config deepspeed_config machine_rank "
            "main_training_function mixed_precision num_machines num_processes rdzv_backend same_network "
            "tpu_use_cluster enable_cpu_affinity main_process_port parallelism_config dynamo_config"
        ),
        "it says how a run is launched, not what it trains",
        "name the run's own config before it: recipe port config.yaml {file} -o recipe.yaml",
    ),
    "deepspeed": Role(
        "a DeepSpeed config",
        words(
            "zero_optimization train_micro_batch_size_per_gpu train_batch_size gradient_clipping fp16 "
            "zero_allow_untested_optimizer wall_clock_breakdown steps_per_print "
            "zero_force_ds_cpu_optimizer"
        ),
        "it says how a run is spread over GPUs, not what it trains",
        "name the run's own config before it: recipe port config.yaml {file} -o recipe.yaml",
    ),
    "adapter_config": Role(
        "a PEFT adapter_config.json",
        words(
            "peft_type r lora_alpha target_modules base_model_name_or_path task_type fan_in_fan_out "
            "init_lora_weights use_rslora use_dora modules_to_save layers_to_transform bias "
            "inference_mode alpha_pattern rank_pattern lora_dropout"
        ),
        "it says what the adapters are, not how they are trained",
        "name the run's TrainingArguments too: recipe port training_args.json {file} -o recipe.yaml",
    ),
    "dataset_info": Role(
        "LLaMA-Factory's dataset_info.json",
        words("hf_hub_url ms_hub_url om_hub_url script_url cloud_file_name file_name"),
        "it says where data sets are, not what is trained on them",
        "name the run's own config before it: recipe port config.yaml {file} -o recipe.yaml",
    ),
    "v1_datasets": Role(
        "a description of LLaMA-Factory v1's data sets",
        words("converter source"),
        "it says where data sets are, not what is trained on them",
        "name the run's own config before it: recipe port config.yaml {file} -o recipe.yaml",
    ),
}
COMMENTS = ("_", "//", "#")
"""How the names of comments begin in JSON. No tool has a data set of such a name."""
LEAST_MARKS = 2
"""The least marks of a role or of a tool that a file must have. A single one may occur in any config."""
MOST_NAMED = 3
"""The most marks that a message names."""

MODELS = words(
    "model_name_or_path base_model model._component_ checkpoint_dir model.model_name dataset._target_ "
    "training_config"
)
"""The dialects' own keys for the model or the run."""


@dataclass(frozen=True)
class Other:
    """A tool whose files are not read.

    Attributes:
        marks: keys that no supported tool has.
        unless: keys that the tool's files do not have; with one of them the file is a supported tool's.
    """

    marks: frozenset[str]
    unless: frozenset[str] = frozenset()


UNREAD = {
    "oumi's launcher or SkyPilot": Other(
        words("resources.cloud resources.accelerators working_dir workdir setup"), MODELS
    ),
    "Tunix's agentic RL": Other(
        words(
            "training_mode agent_class_path agent_kwargs env_class_path env_kwargs chat_parser_config "
            "agentic_grpo_config agentic_ppo_config"
        )
    ),
    "Unsloth Studio": Other(
        words(
            "data.format_type training.training_type training.max_seq_length training.num_epochs "
            "training.train_on_completions training.random_seed lora.lora_r lora.use_loftq "
            "lora.vision_all_linear lora.finetune_language_layers logging.enable_wandb"
        ),
        MODELS,
    ),
    "AutoTrain": Other(
        words(
            "data.column_mapping params.block_size params.model_max_length params.batch_size params.peft "
            "params.mixed_precision params.lr params.epochs hub.push_to_hub hub.username"
        )
    ),
    "Ludwig": Other(words("input_features output_features")),
    "mistral-finetune": Other(
        words("model_id_or_path data.instruct_data data.eval_instruct_data ckpt_freq run_dir optim.pct_start")
    ),
    "verl": Other(
        words(
            "data.train_files data.val_files data.micro_batch_size_per_gpu model.partial_pretrain "
            "trainer.default_local_dir trainer.total_epochs actor_rollout_ref algorithm.adv_estimator"
        )
    ),
    "NeMo RL": Other(words("policy.model_name policy.train_global_batch_size cluster.gpus_per_node")),
    "mlx-lm": Other(
        words("lora_parameters adapter_path steps_per_report steps_per_eval val_batches iters fine_tune_type")
    ),
    "H2O LLM Studio": Other(
        words("llm_backbone experiment_name dataset.prompt_column augmentation.token_mask_probability")
    ),
}
"""Tools whose files are not read, with keys that identify them."""

FEW = 3
"""The most unknown keys at which a file can still be its tool's. A tool that accepts unknown keys can have as
many as half of all keys."""


@dataclass(frozen=True)
class Recognized:
    """The recognized tool, and its files."""

    dialect: Module
    sources: Sources


E1110 = Code(
    "E1110",
    "several runs",
    cause="There are two configs of one tool, two files of one kind, or a pipeline of stages. A "
    "recipe is one run.",
    cure="Port each stage separately. The `model.id` of each stage is the `merge.output` of the stage "
    "before it.",
)


def recognize(files: Sequence[Source], chosen: str | None = None) -> Recognized | list[Diagnostic]:
    """Find the tool that the files belong to, or return the errors that say why it is not clear."""
    roles: dict[str, Source] = {}
    mains: list[Source] = []
    for file in files:
        role = role_of(file)
        if role is None:
            mains.append(file)
        elif role in roles:
            message = f"{file.file} is {ROLES[role].title}, and {roles[role].file} is one already"
            return [Diagnostic(E1110, message, help="name one of the two", span=file.top())]
        else:
            roles[role] = file
    if not mains:
        return [_half(role, file) for role, file in roles.items()]
    known = {main.file: _dialects(main) for main in mains}
    if chosen is None:
        unread = [key for main in mains if (key := _unread(main))]
        unknown = unread or [_unknown(main) for main in mains if not known[main.file]]
        if unknown:
            return unknown
    if len(mains) > 1:
        return [_several(mains, [known[main.file] for main in mains])]
    by_name = chosen and not mains[0].script
    fitting = [dialects.load(str(chosen))] if by_name else known[mains[0].file]
    if len(fitting) > 1:  # the accompanying files may decide between the dialects
        fitting = [
            dialect for dialect in fitting if set(roles) <= set(dialects.KNOWN[dialect.NAME].roles)
        ] or fitting
    if len(fitting) > 1:
        return [_unclear(mains[0], fitting)]
    useless = list(_useless(fitting[0], roles))
    return useless or Recognized(fitting[0], Sources(mains[0], roles))


def role_of(file: Source) -> str | None:
    """Return the role of an accompanying file, or None for a tool's own config or an unknown file."""
    if not isinstance(file.data, dict) or not file.data or file.script:
        return None
    entries = [entry for name, entry in file.data.items() if not str(name).startswith(COMMENTS)]
    for role in ("dataset_info", "v1_datasets"):
        if entries and all(isinstance(entry, dict) and ROLES[role].marks & set(entry) for entry in entries):
            return role
    counts = {name: len(role.marks & set(file.data)) for name, role in ROLES.items()}
    best = max(counts, key=lambda name: counts[name])
    own_names = max(_count(file, dialect) for dialect in dialects.every())
    return best if counts[best] >= LEAST_MARKS and counts[best] > own_names else None


def _count(file: Source, dialect: Module) -> int:
    return sum(file.has(mark) for mark in dialect.MARKS)


def _dialects(file: Source) -> list[Module]:
    if file.script:
        return [dialects.load("trl")]
    counts = [(_count(file, dialect), dialect) for dialect in dialects.every()]
    most = max(count for count, _ in counts)
    return [dialect for count, dialect in counts if count == most] if most else []


E1193 = Code(
    "E1193",
    "tool that is not supported",
    cause="The keys identify a tool whose files `recipe port` does not read. Read as another tool's "
    "file, it would become a different run.",
    cure="Start from a new recipe with `recipe new`. `--from` reads the file as one of a supported tool.",
)


def _unread(file: Source) -> Diagnostic | None:
    """Return the error for a file of a tool that is not read yet; it names the tool and the telltale keys."""
    if file.script:
        return None
    unread = {
        tool: sorted(filter(file.has, other.marks))
        for tool, other in UNREAD.items()
        if not any(map(file.has, other.unless))
    }
    tool = max(unread, key=lambda tool: len(unread[tool]), default="")
    if not tool or len(unread[tool]) < LEAST_MARKS:
        return None
    keys = listing([f"`{key}`" for key in unread[tool][:MOST_NAMED]])
    message = f"{file.file} is a file of {tool}, which recipec does not read yet, judging by {keys}"
    read = listing([dialect.TITLE for dialect in dialects.every()])
    help = (
        f"start a recipe by hand: recipe new my-run; recipec reads files of {read}, and "
        "--from DIALECT reads this one as one of them"
    )
    return Diagnostic(E1193, message, help=help, span=file.keys.get(unread[tool][0]))


E1102 = Code(
    "E1102",
    "file without a training run",
    cause="The file belongs to a run, but does not say what is trained: an accelerate or DeepSpeed "
    "config, an adapter_config.json, or a dataset_info.json.",
    cure="Name the config of the run before it, in the same command.",
)


def _half(role: str, file: Source) -> Diagnostic:
    known = ROLES[role]
    message = f"{file.file} is {known.title}: {known.half}"
    return Diagnostic(E1102, message, help=known.help.format(file=file.file), span=file.top())


E1101 = Code(
    "E1101",
    "unknown kind of config",
    cause="The file has none of the keys that identify a tool's config.",
    cure="Name a config of one of the tools that the message lists. `--from` names the tool if its "
    "config is unusual.",
)


def _unknown(file: Source) -> Diagnostic:
    looked = "\n".join(f"  {line}" for line in _looked_for(file))
    if not isinstance(file.data, dict):
        stages = isinstance(file.data, list) and all(isinstance(item, dict) for item in file.data)
        if stages and len(file.data) > 1:
            return _pipeline(file, f"a list of {len(file.data)} mappings")
        message = f"{file.file} is not a mapping of `key: value` lines, as a config must be"
        return Diagnostic(
            E1101, message, help=f"looked for keys of\n{looked}", span=Span(file.file, 1, 1, "")
        )
    for key in ("stages", "pipeline"):
        inner = file.get(key)
        if isinstance(inner, list | dict) and len(inner) > 1:
            return _pipeline(file, f"`{key}` with {len(inner)} of them")
    message = f"{file.file} is not a config of a tool that recipec reads"
    return Diagnostic(
        E1101, message, help=f"looked for keys of\n{looked}\nor name its tool with --from", span=file.top()
    )


def _looked_for(file: Source) -> Iterator[str]:
    """Yield each dialect with some of its marks, and with the keys that look like misspellings of one."""
    present = list(file.data) if isinstance(file.data, dict) else []
    for dialect in dialects.every():
        close = [
            f"; `{key}` is nearly `{near[0]}`"
            for key in present
            if (near := get_close_matches(str(key), sorted(dialect.MARKS), n=1, cutoff=NEARLY))
        ]
        yield f"{dialect.TITLE}: {dialects.KNOWN[dialect.NAME].telling}{''.join(close)}"


def _pipeline(file: Source, what: str) -> Diagnostic:
    message = f"{file.file} is a pipeline of several stages ({what}); a recipe is one of them"
    help = "make a file of each stage; the next stage's model.id is merge.output of the one before"
    return Diagnostic(E1110, message, help=help, span=file.top())


E1103 = Code(
    "E1103",
    "tool of the config is unclear",
    cause="The file has keys of several tools, or two files belong to two tools.",
    cure="Name the tool with `--from`, or port one of the files.",
)


def _several(mains: Sequence[Source], known: Sequence[Sequence[Module]]) -> Diagnostic:
    first, second = mains[0], mains[1]
    names = [listing([d.TITLE for d in matching], "or") or "unknown" for matching in known]
    if names[0] == names[1]:
        message = f"{first.file} and {second.file} are two runs of {names[0]}; a recipe is one"
        help = (
            f"port each separately: recipe port {first.file}; stages that follow each other pass "
            "merge.output on as model.id"
        )
        return Diagnostic(E1110, message, help=help, span=second.top())
    message = f"files of two tools: {first.file} is of {names[0]}, {second.file} of {names[1]}"
    return Diagnostic(E1103, message, help=f"port one of them: recipe port {first.file}", span=second.top())


def _unclear(file: Source, fitting: Sequence[Module]) -> Diagnostic:
    message = f"{file.file} may be a config of {listing([dialect.TITLE for dialect in fitting], 'or')}"
    help = f"name its tool: --from {fitting[0].NAME}"
    return Diagnostic(E1103, message, help=help, span=file.top())


E1104 = Code(
    "E1104",
    "file of another tool",
    cause="A file belongs to another tool's config, such as a dataset_info.json next to an Axolotl config.",
    cure="Leave it out.",
)


def _useless(dialect: Module, roles: dict[str, Source]) -> Iterator[Diagnostic]:
    known = dialects.KNOWN[dialect.NAME].roles
    for role, file in roles.items():
        if role not in known:
            message = f"{dialect.TITLE} does not use {file.file}, which is {ROLES[role].title}"
            yield Diagnostic(E1104, message, help="leave the file out", span=file.top())


LEAST = 5
"""The least length of a common beginning."""

PACKAGES = {"adapter_config": "peft", "accelerate": "accelerate", "dataset_info": "llamafactory"}
"""By role: the package of `known` that lists the keys of such a file."""

TOP = {"axolotl": "config", "litgpt": "lora full", "swift": "sft rlhf"}
"""Sections that hold the keys of the config itself. The other sections hold the keys of nested sections."""


def say_unread(ledger: Ledger, dialect: Module, recognized: bool) -> Iterator[Diagnostic]:
    """Record every key without a finding as unsupported, and warn about each.

    Args:
        recognized: whether the dialect was recognized by the keys. A file with many unknown keys is then
            refused as another tool's.
    """
    roles = {source.file: role for role, source in ledger.sources.others.items()}
    failed = has_errors(ledger.diagnostics)
    foreign: list[str] = []
    for source in ledger.sources.all():
        role = roles.get(source.file)
        title = ROLES[role].title if role else dialect.TITLE
        for key in ledger.unread(source):
            marks = ROLES[role].marks if role else dialect.MARKS
            names = _names(PACKAGES.get(role, "") if role else dialect.NAME, key) | set(marks)
            leaf = key.rpartition(".")[2].partition("[")[0]
            if leaf not in names:
                yield _no_key(ledger, source, key, title, nearest(leaf, sorted(names)))
                foreign += [] if role else [key]
            elif failed:
                ledger.unsupported(source, key, "not checked, because other keys have errors")
            else:
                ledger.unsupported(source, key, "recipec does not use this value")
                message = f"recipec does not use the value of `{key}`"
                yield Diagnostic(W1114, message, key, f"correct it: it is a key of {title}", source.span(key))
    if recognized and not ledger.sources.main.script:
        ledger.diagnostics += _foreign(ledger.sources.main, dialect, foreign)


def _foreign(main: Source, dialect: Module, foreign: Sequence[str]) -> Iterator[Diagnostic]:
    """Yield the error for a file with too many keys that its tool does not have."""
    top = list(dict.fromkeys(re.split(r"[.\[]", key)[0] for key in foreign))
    accepted = len(main.data) // 2 if dialects.KNOWN[dialect.NAME].extra else 0
    if len(top) > max(FEW, accepted):
        named = listing([f"`{key}`" for key in top[:MOST_NAMED]])
        message = (
            f"{main.file} is a file of another tool: {dialect.TITLE} does not have {len(top)} of its keys"
        )
        help = (
            f"they include {named}; start a recipe by hand: recipe new my-run; or ignore them: "
            f"--from {dialect.NAME}"
        )
        yield Diagnostic(E1193, message, help=help, span=main.keys.get(top[0]) or main.top())


def _no_key(ledger: Ledger, source: Source, key: str, title: str, close: str | None) -> Diagnostic:
    ledger.unsupported(source, key, f"not a key of {title}{f': nearly `{close}`' if close else ''}")
    help = f"did you mean `{close}`?" if close else "remove it, or name the file's tool with --from"
    place = source.keys.get(key) or source.span(key)
    return Diagnostic(W1114, f"`{key}` is not a key of {title}", key, help, place)


def nearest(key: str, names: Sequence[str]) -> str | None:
    """Return the name that a key was probably meant for: one begins with the other, or they are similar."""
    begins = [name for name in names if key.startswith(name) or name.startswith(key)]
    begins = [name for name in begins if min(len(key), len(name)) >= LEAST]
    if begins:
        return min(begins, key=lambda name: abs(len(name) - len(key)))
    close = get_close_matches(key, names, n=1, cutoff=0.8)
    return close[0] if close else None


def _names(tool: str, key: str) -> set[str]:
    """Return the keys that the tool accepts at a key's place, without the sections that they lie in."""
    sections = tools().get(tool, {}).get("sections", {})
    own_keys = TOP.get(tool, "").split() if "." not in key else []
    chosen = [sections[name] for name in own_keys] or list(sections.values())
    return {name.rpartition(".")[2] for section in chosen for name in section}
