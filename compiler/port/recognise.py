"""Which tool's files these are, and the part that each of them plays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from compiler.port import dialects
from compiler.port.dialects import Module
from compiler.port.source import Source, Sources
from compiler.wording import listing
from spec.diagnostics import Diagnostic, Span

NEARLY = 0.9
"""How like a mark a key must be to be taken for a slip."""


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


@dataclass(frozen=True)
class Role:
    """A file that goes with a tool's own.

    Attributes:
        title: what it is, for messages.
        marks: keys that tell it.
        half: what it says, and what is missing beside it.
        help: what to give beside it.
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
        "it says where data sets lie, not what is trained on them",
        "name the run's own config before it: recipe port config.yaml {file} -o recipe.yaml",
    ),
}
LEAST_MARKS = 2
"""Keys of a role that a file must have; one alone may stand in any config."""


@dataclass(frozen=True)
class Recognised:
    """The tool, and its files."""

    dialect: Module
    sources: Sources


def recognise(files: Sequence[Source], chosen: str | None = None) -> Recognised | list[Diagnostic]:
    """The tool that the files are of, or why it cannot be told.

    Args:
        files: as read; each is a mapping, or it is in no dialect.
        chosen: the dialect's name, by --from.
    """
    roles: dict[str, Source] = {}
    mains: list[Source] = []
    for file in files:
        role = _role(file)
        if role is None:
            mains.append(file)
        elif role in roles:
            message = f"{file.file} is {ROLES[role].title}, and {roles[role].file} is one already"
            return [Diagnostic("E1110", message, help="name one of the two", span=file.top())]
        else:
            roles[role] = file
    if not mains:
        return [_half(role, file) for role, file in roles.items()]
    known = {main.file: _dialects(main) for main in mains}
    if chosen is None:
        unknown = [_unknown(main) for main in mains if not known[main.file]]
        if unknown:
            return unknown
    if len(mains) > 1:
        return [_several(mains, [known[main.file] for main in mains])]
    fitting = [dialects.load(chosen)] if chosen else known[mains[0].file]
    if len(fitting) > 1:  # whose other files these are may tell it
        fitting = [one for one in fitting if set(roles) <= set(dialects.KNOWN[one.NAME].roles)] or fitting
    if len(fitting) > 1:
        return [_unclear(mains[0], fitting)]
    useless = list(_useless(fitting[0], roles))
    return useless or Recognised(fitting[0], Sources(mains[0], roles))


def _role(file: Source) -> str | None:
    """The role of a file that is no tool's own, None for one that is, or that is unknown."""
    if not isinstance(file.data, dict) or not file.data:
        return None
    if all(isinstance(each, dict) and ROLES["dataset_info"].marks & set(each) for each in file.data.values()):
        return "dataset_info"
    counts = {name: len(role.marks & set(file.data)) for name, role in ROLES.items()}
    best = max(counts, key=lambda name: counts[name])
    own = max(_count(file, dialect) for dialect in dialects.every())
    return best if counts[best] >= LEAST_MARKS and counts[best] > own else None


def _count(file: Source, dialect: Module) -> int:
    return sum(file.has(mark) for mark in dialect.MARKS)


def _dialects(file: Source) -> list[Module]:
    """The dialects with most marks in a file; none where no mark stands in it."""
    counts = [(_count(file, dialect), dialect) for dialect in dialects.every()]
    most = max(count for count, _ in counts)
    return [dialect for count, dialect in counts if count == most] if most else []


def _half(role: str, file: Source) -> Diagnostic:
    known = ROLES[role]
    message = f"{file.file} is {known.title}: {known.half}"
    return Diagnostic("E1102", message, help=known.help.format(file=file.file), span=file.top())


def _unknown(file: Source) -> Diagnostic:
    looked = "\n".join(f"  {line}" for line in _looked_for(file))
    if not isinstance(file.data, dict):
        stages = isinstance(file.data, list) and all(isinstance(item, dict) for item in file.data)
        if stages and len(file.data) > 1:
            return _pipeline(file, f"a list of {len(file.data)} mappings")
        message = f"{file.file} is no mapping of `key: value` lines, as every config is"
        return Diagnostic(
            "E1101", message, help=f"looked for keys of\n{looked}", span=Span(file.file, 1, 1, "")
        )
    for key in ("stages", "pipeline"):
        inner = file.get(key)
        if isinstance(inner, list | dict) and len(inner) > 1:
            return _pipeline(file, f"`{key}` with {len(inner)} of them")
    message = f"{file.file} is in no dialect that is known here"
    return Diagnostic(
        "E1101", message, help=f"looked for keys of\n{looked}\nor say whose it is by --from", span=file.top()
    )


def _looked_for(file: Source) -> Iterator[str]:
    """Each dialect, with some of its marks and what is spelled nearly like one."""
    present = list(file.data) if isinstance(file.data, dict) else []
    for dialect in dialects.every():
        close = [
            f"; `{key}` is nearly `{found[0]}`"
            for key in present
            if (found := get_close_matches(str(key), sorted(dialect.MARKS), n=1, cutoff=NEARLY))
        ]
        yield f"{dialect.TITLE}: {dialects.KNOWN[dialect.NAME].telling}{''.join(close)}"


def _pipeline(file: Source, what: str) -> Diagnostic:
    message = f"{file.file} is a pipeline of several stages ({what}); a recipe is one of them"
    help = (
        "make a file of each stage, and port each: the next one's model.id is merge.output of the one before"
    )
    return Diagnostic("E1110", message, help=help, span=file.top())


def _several(mains: Sequence[Source], known: Sequence[Sequence[Module]]) -> Diagnostic:
    first, second = mains[0], mains[1]
    names = [listing([d.TITLE for d in found], "or") or "unknown" for found in known]
    if names[0] == names[1]:
        message = f"{first.file} and {second.file} are two runs of {names[0]}; a recipe is one"
        help = (
            f"port each alone: recipe port {first.file}; stages that follow each other pass merge.output on "
            "as model.id"
        )
        return Diagnostic("E1110", message, help=help, span=second.top())
    message = f"two dialects at once: {first.file} is of {names[0]}, {second.file} of {names[1]}"
    return Diagnostic("E1103", message, help=f"port one of them: recipe port {first.file}", span=second.top())


def _unclear(file: Source, fitting: Sequence[Module]) -> Diagnostic:
    message = f"{file.file} may be of {listing([dialect.TITLE for dialect in fitting], 'or')}"
    help = f"say whose it is: --from {fitting[0].NAME}"
    return Diagnostic("E1103", message, help=help, span=file.top())


def _useless(dialect: Module, roles: dict[str, Source]) -> Iterator[Diagnostic]:
    known = dialects.KNOWN[dialect.NAME].roles
    for role, file in roles.items():
        if role not in known:
            message = f"{dialect.TITLE} has no use for {file.file}, which is {ROLES[role].title}"
            yield Diagnostic("E1104", message, help="leave it out", span=file.top())
