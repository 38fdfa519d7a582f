"""`recipe port --to`: write a recipe as the config of a GPU tool, with a report.

The written config is ported back at once, as `recipe port` reads it. Each value of the recipe is compared
with the value that comes back, which gives its verdict. So the meaning of a tool's keys is defined only once,
in dialects/.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from recipec.compiler.lower import Lowered
from recipec.compiler.lowering.run_length import warmup_steps
from recipec.compiler.wording import listing
from recipec.port import dialects
from recipec.port.back_keys import ALPACA, Config, alpaca, direct, dumped, written
from recipec.port.keys import table
from recipec.port.ledger import Finding, Ledger, Verdict, prefixes
from recipec.port.meaning import conversion
from recipec.port.meaning.adapters import express
from recipec.port.port import Ported
from recipec.port.read import Tree, parse_json, parse_yaml
from recipec.port.report import rows, summary
from recipec.port.settle import renamed
from recipec.port.source import Source, Sources
from recipec.spec.codes import Code
from recipec.spec.commented_recipe import Line, flat_text, recipe_text
from recipec.spec.core_schema import flow
from recipec.spec.diagnostics import Diagnostic, in_order
from recipec.spec.language import VERSION, Data, Recipe, Section
from recipec.spec.language import Source as DataSource
from recipec.spec.load import Loaded, display, load

LEFT = table("""
exact recipe: the version of the recipe language
exact extends: its values are written with the rest
exact name: the output folder has the name
exact mesh: the mesh is for TPUs; --devices gives the number of GPUs
exact sharding: sharding on the TPU mesh; accelerate's file configures it for GPUs
exact cache: recipec's cache between runs
exact checkpoint.local: checkpoints on the hosts' local disks
exact launch cost: a setting of TPU machines
exact xla: flags of the TPU compiler
exact model.attention_block: how the TPU kernel computes the same attention
exact train.log.mlflow_experiment: the name of the MLflow experiment; the Trainer reads it from
    MLFLOW_EXPERIMENT_NAME
exact train.log.wandb_project: the name of the Weights & Biases project; the Trainer reads it from
    WANDB_PROJECT
exact data.max_invalid_ratio: the tool stops at malformed rows, or trains on them
exact merge: what happens to the weights after training; the tool has its own merge
unused serve benchmark evaluate: a setting of the server, which training does not read
near remat.policy: the tool computes each layer again: the same numbers, with other memory and time
near model.attention: another attention kernel, which also keeps the samples of a row apart
near model.dtype: the tool stores weights and computes products in another precision
near train.optimizer.master_weights: the tool stores weights in another precision, which may round small
    updates off
near lora.dtype: the tool stores adapters in another precision
near data.eval_seed: the tool draws the held-out rows with another seed
near data.shuffle_seed: another order of the samples
near train.loss_normalization: one of the two takes a step's loss as the mean over its tokens, the other as
    the mean over its micro-batches' means
near train.micro_batch_size: rows per GPU; the rows per step are the same
lost data.eval data.eval_fraction: the tool evaluates on other rows, or on none; what is trained is the same
lost train.eval_every: the tool does not evaluate
lost train.early_stopping: the tool runs until its last step, or stops by another rule
lost train.generations: the tool answers no prompts during training
lost checkpoint.keep_best: the tool does not keep the checkpoint of the best evaluation
lost data.overlong: the tool cuts longer samples in its own way, and trains on the rest
lost checkpoint.directory checkpoint.every_steps checkpoint.keep: where and when checkpoints are kept
lost train.log: what is logged, and how often
""")
"""What it means, by path or section, that the tool has another value or none. Any path that is missing here
changes what is learned, so a difference in it is an error."""

VERDICTS = {
    "exact": Verdict.EXACT,
    "near": Verdict.APPROXIMATED,
    "lost": Verdict.UNSUPPORTED,
    "unused": Verdict.UNUSED,
}
ONE = "recipec assumes one GPU; --devices N sets another number, and keeps the rows per step"


@dataclass(frozen=True)
class Asked:
    """The arguments of the command line."""

    tool: str
    devices: int | None = None
    place: Path = Path("config.yaml")


E1199 = Code(
    "E1199",
    "GPUs that cannot share a step",
    cause="The rows of an optimizer step stay those of the recipe, and the GPUs of `--devices` take "
    "equal shares of them.",
    cure="Use a number of GPUs that divides `train.global_batch_size`.",
)


WRITTEN = ("sft", "dpo", "orpo", "cpo", "kto")
"""The objectives whose runs are written for other tools."""


def back(loaded: Loaded, lowered: Lowered, asked: Asked) -> Ported:
    """Write the config of a checked recipe. A recipe with errors gives only its diagnostics."""
    program = lowered.program
    if program is None:
        return Ported(diagnostics=lowered.diagnostics)
    title = dialects.load(asked.tool).TITLE
    count, size = asked.devices or 1, program.recipe.train.global_batch_size
    source, path = _source(loaded), "train.objective"
    if program.recipe.train.objective not in WRITTEN:
        message = f"`--to` does not write runs of {program.recipe.train.objective} for {title}"
        help = f"it writes those of {listing(WRITTEN)}"
        return Ported(diagnostics=[Diagnostic(E1198, message, path, help, source.place(path))])
    if size % count:
        fits = max(n for n in range(1, count) if size % n == 0)
        message = f"{count} GPUs cannot share the {size} rows of a step equally"
        diagnostic = Diagnostic(E1199, message, "train.global_batch_size", f"--devices {fits}")
        return Ported(diagnostics=[replace(diagnostic, span=source.place(diagnostic.path))])
    config = written(program, asked.tool, count, asked.place.parent)
    lines = {key: Line(value) for key, value in config.keys.items()}
    returned = _ported(flat_text(lines, []), config, asked)
    ledger = Ledger(Sources(source), files={name: dumped(name, data) for name, data in config.beside.items()})
    _judge(ledger, config, returned, title)
    if asked.devices is None:
        note = f"{ONE}, {config.recipe.train.global_batch_size}"
        ledger.findings.append(Finding("", "--devices", 1, Verdict.DEFAULTED, (), note))
    ported = Ported(
        title, (source.file,), rows(ledger, ledger.sources), ledger=ledger, sources=ledger.sources
    )
    ported.to = True
    ported.diagnostics = in_order(ledger.diagnostics)
    ported.missing = tuple(
        diagnostic.message for diagnostic in ledger.diagnostics if diagnostic.severity == "error"
    )
    ported.text = flat_text({**lines, **_commented(lines, returned)}, _header(ported, config, asked))
    return ported


def _source(loaded: Loaded) -> Source:
    """Turn the recipe into a Source, with the places of its own keys and of the keys that it inherits."""
    bare = Source(loaded.path, display(loaded.path), loaded.raw)
    paths = {path for leaf in bare.leaves() for path in prefixes(leaf)}
    spans, keys = ({path: loaded.sources.span(path, at) for path in paths} for at in (False, True))
    return replace(
        bare,
        spans={path: span for path, span in spans.items() if span},
        keys={path: span for path, span in keys.items() if span},
    )


def _ported(text: str, config: Config, asked: Asked) -> Ledger:
    """Port the config and the files that it needs, as `recipe port` does."""
    dialect = dialects.load(asked.tool)

    def read(name: str, content: str) -> Source:
        tree = Tree(content, name)
        data = parse_json(tree) if name.endswith(".json") else parse_yaml(tree)
        return Source(asked.place.parent / name, name, data, tree.spans, tree.keys)

    others = {
        name.partition(".")[0]: read(name, dumped(name, data))
        for name, data in config.beside.items()
        if isinstance(data, Mapping)
    }
    main = renamed(read(asked.place.name, text), dialect.NAME)
    script = config.recipe.train.objective if dialects.KNOWN[dialect.NAME].scripts else None
    ledger = Ledger(Sources(main, others), script=script)
    dialects.apply(dialect, ledger)
    return ledger


def _judge(ledger: Ledger, config: Config, returned: Ledger, title: str) -> None:
    source, recipe = ledger.sources.main, config.recipe
    there = _returned(recipe, config, returned)
    came = dict(_leaves(there))
    for path, value in _leaves(recipe):
        row = next((row for at in reversed([*prefixes(path)]) for row in LEFT if at in row.keys), None)
        findings = [finding for finding in returned.findings if path in finding.recipe and finding.file]
        keys = {finding.key: None for finding in findings}
        notes = dict.fromkeys(finding.note for finding in findings if finding.verdict is Verdict.APPROXIMATED)
        stands = source.has(path)
        retold = _retold(path, recipe, returned)
        notes |= {retold: None} if retold else {}
        notes |= {CUT: None} if path in ("data.train", "data.eval") and _cut(recipe, there, path) else {}
        same = path in came and (retold is not None or _alike(path, value, came[path], config))
        if same and path in ("data.train", "data.eval"):
            same = _own(recipe.data, value) == _own(there.data, came[path])
        # Where a value affects learning, a dialect writes out the tool's default, so an equal value suffices.
        # Any other value that the recipe gives must come from a key of the config.
        same = same and (row is None or not stands or path in returned.lines)
        verdict, note = Verdict.EXACT, ""
        if same and any(notes):
            verdict, note = Verdict.APPROXIMATED, "; ".join(filter(None, notes))
        elif row is not None and (row.verdict in ("exact", "unused") or not same):
            verdict, note = VERDICTS[row.verdict], row.note
        elif not same:
            verdict = Verdict.UNSUPPORTED
            note, way = _lost(path, came, config)
            if note != CONSEQUENCE:
                ledger.diagnostics.append(_learned(source, path, note, title, way))
        if stands:
            ledger.findings.append(Finding(source.file, path, source.get(path), verdict, (*keys,), note))
        elif keys or (_trains(path) and (verdict is Verdict.UNSUPPORTED or (not same and bool(note)))):
            note = "; ".join(filter(None, ("the recipe's default", note)))
            plain = verdict is Verdict.EXACT
            verdict = Verdict.DEFAULTED if plain else verdict
            ledger.findings.append(Finding("", path, value, verdict, (*keys,), note))
    direct_keys = {key: path for path, key in direct(config.tool).items()}
    refused = [finding for finding in returned.diagnostics if finding.severity == "error"]
    for finding in refused if not ledger.diagnostics else ():
        ledger.diagnostics.append(_learned(source, direct_keys.get(finding.path, ""), finding.message, title))


def _trains(path: str) -> bool:
    return path.partition(".")[0] in ("model", "lora", "data", "train")


E1198 = Code(
    "E1198",
    "value without a counterpart in the other tool",
    cause="With `recipe port --to`, the tool has no key for a value that affects the result, or the "
    "tool refuses the resulting config. The config would describe a different run.",
    cure="Change the value with `--set PATH=VALUE`, or use `--partial`. A partial config names what "
    "is missing.",
)


def _learned(source: Source, path: str, why: str, title: str, way: str = "") -> Diagnostic:
    message = f"{title}'s config cannot express `{path}`: {why}" if path else f"{title} refuses it: {why}"
    help = (
        f"{way and f'{way}; '}--partial writes the config anyway, and its first line says that it is partial"
    )
    return Diagnostic(E1198, message, path, help, source.place(path))


def _lost(path: str, came: Mapping[str, Any], config: Config) -> tuple[str, str]:
    """Return why a value that affects learning does not come back, and what can be done; "" for nothing."""
    recipe = config.recipe
    if came.get("data.format") != recipe.data.format and path in OF_ROWS:
        way = AS_TURNS.get(config.tool, AS_MESSAGES) if recipe.data.format == "instruction" else AS_MESSAGES
        return (PREPARED, way) if path == "data.format" else (CONSEQUENCE, "")
    if path in ("data.fields", "data.transform"):
        return PREPARED, AS_MESSAGES
    if path in ("data.train", "data.eval") or path not in came:
        return "it has no key for these sources" if path in came else "it has no key for this", ""
    there = flow(came[path])
    return f"the tool would use {there}", f"--set {shlex.quote(f'{path}={there}')}"


PREPARED = "prepare the rows beforehand, with the columns that the tool reads"
AS_MESSAGES = "write them as `messages` into a file that data.train names"
AS_TURNS = {
    "trl": "write them as `prompt` and `completion`, a list of messages each, into a file that data.train"
    " names, with data.format: prompt_completion",
    "axolotl": f"{AS_MESSAGES}, with data.format: chat",
}
"""What to do with instruction rows, by tool: TRL trains on the completion, Axolotl on each answer."""
CONSEQUENCE = "follows from data.format"
OF_ROWS = ("data.format", "data.fields", "data.transform", "data.loss_on")


ONE_BREAK = "the tool puts one line break between an instruction and its input; recipec puts a blank line"
UNNAMED = "the tool does not read these columns without a name in data.fields: {names}"
AFTER = "the tool does not train on what the template writes after the end of an answer"


WARMUP = ("train.schedule.warmup_steps", "train.schedule.warmup_ratio")


def _retold(path: str, recipe: Recipe, returned: Ledger) -> str | None:
    """Say how a value differs that comes back in another form; None if it does not come back."""
    if path in WARMUP and recipe.train.steps is not None:
        steps = returned.value(WARMUP[0])
        if steps is None:
            return None
        more = steps - warmup_steps(recipe, recipe.train.steps)
        return {0: "", 1: f"the tool's warm-up takes {steps} steps instead of one"}.get(more)
    return _retold_rows(path, recipe, returned)


def _retold_rows(path: str, recipe: Recipe, returned: Ledger) -> str | None:
    """Say how instruction rows differ that come back as messages."""
    data = recipe.data
    columns = alpaca(data.fields)
    transform = conversion.alpaca(conversion.Alpaca(**{"query": None, **columns}), False)
    if data.format != "instruction" or data.transform or returned.files.get(conversion.FILE) != transform:
        return None
    unnamed = [f"`{name}`" for key, name in ALPACA.items() if key not in columns]
    if path == "data.format":
        joined = ONE_BREAK if "query" in columns else ""
        return "; ".join(filter(None, (joined, UNNAMED.format(names=", ".join(unnamed)) if unnamed else "")))
    if path == "data.loss_on" and data.loss_on == "completion":
        return AFTER
    return "" if path in ("data.fields", "data.transform") else None


def _leaves(section: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a recipe with their paths. Values other than sections are not split."""
    for name in type(section).model_fields if isinstance(section, Section) else ():
        value, at = getattr(section, name), f"{path}.{name}".lstrip(".")
        if isinstance(value, Section):
            yield from _leaves(value, at)
        else:
            yield at, value


def _returned(recipe: Recipe, config: Config, returned: Ledger) -> Any:
    """Return the recipe that the ported config gives, on the same machine, or None if it gives none."""
    axes = {"accelerator": "v5p-8", "axes": {"fsdp": 4}}
    lines = {**returned.lines, "recipe": Line(VERSION), "name": Line(recipe.name)}
    lines |= {f"mesh.{key}": Line(value) for key, value in axes.items()}
    loaded = load(config.program.source, text=recipe_text(lines, []))
    return loaded.recipe or loaded.tentative


def _alike(path: str, here: Any, there: Any, config: Config) -> bool:
    if path in ("data.train", "data.eval"):
        if any(source.path.endswith(".array_record") for source in here):  # `datasets` cannot read these
            return False
        return [_place(source) for source in here] == [_place(source) for source in there]
    if path in ("lora.targets", "lora.layers"):
        targets, layers = express(config.model, config.sites)
        return sorted(there) == sorted(targets) if path == "lora.targets" else there == layers
    if path == "data.fields":
        return _renamed(here) == _renamed(there)
    if path == "data.transform":  # the port writes its own file, which never equals the recipe's
        return not here and not there
    if path == "data.chat_template":
        return here == (config.beside.get(there, there) if isinstance(there, str) else there)
    if path in ("train.schedule.warmup_steps", "train.schedule.warmup_ratio"):
        return (here or 0) == (there or 0)
    if isinstance(here, float) and isinstance(there, float):
        return math.isclose(here, there, rel_tol=1e-9)
    return bool(here == there)


def _own(data: Data, sources: Sequence[DataSource]) -> list[Any]:
    """Return the form of the rows of each source, or [] if no source has a form of its own."""
    names = ("format", "fields", "transform", "chat_template", "loss_on")
    if all(getattr(source, name) is None for source in (*data.train, *data.eval) for name in names):
        return []
    held = [data.of(source) for source in sources]
    return [
        (source.format, _renamed(source.fields), source.transform, source.chat_template, source.loss_on)
        for source in held
    ]


CUT = "the tool cuts samples of a source that are too long in another way"


def _cut(recipe: Recipe, there: Recipe, path: str) -> bool:
    """Return whether sources differ in data.overlong, while the recipes' own values are the same."""
    ours, other = (
        [form.data.of(source).overlong for source in getattr(form.data, path.partition(".")[2])]
        for form in (recipe, there)
    )
    return recipe.data.overlong == there.data.overlong and ours != other


def _place(source: Any) -> tuple[Any, ...]:
    split = source.split or "train"
    split = f"{split}[:{source.limit}]" if source.limit and "[" not in split else split
    nested = source.limit if source.limit and "[" in (source.split or "") else None
    path = source.path if "://" in source.path else PurePosixPath(source.path).as_posix()
    return path, source.weight, source.config, split, nested


def _renamed(fields: Mapping[str, str]) -> dict[str, str]:
    return {name: there for name, there in fields.items() if name != there}


def _commented(lines: Mapping[str, Line], returned: Ledger) -> dict[str, Line]:
    """Return the keys that do not come back exactly, with the reasons as comments."""
    return {
        finding.key: Line(lines[finding.key].value, finding.note)
        for finding in returned.findings
        if finding.key in lines and finding.verdict is Verdict.APPROXIMATED
    }


RUN = {
    "trl": "trl {objective} --config {config}",
    **{
        name: f"python examples/scripts/{name}.py --config {{config}}, with the script of TRL's repository"
        for name in ("orpo", "cpo")
    },
    "llamafactory": "llamafactory-cli train {config}",
    "axolotl": "axolotl train {config}",
}
LAUNCH = "accelerate launch --config_file accelerate.yaml"
SPREAD = {
    **RUN,
    **{name: RUN[name].replace("python", LAUNCH) for name in ("orpo", "cpo")},
    "llamafactory": f"{LAUNCH} -m llamafactory.launcher {{config}}",
    "axolotl": "axolotl train {config} --launcher accelerate -- --config_file accelerate.yaml",
}
"""How to run a config, on one GPU and on several. TRL has no commands for ORPO and CPO."""


def _header(ported: Ported, config: Config, asked: Asked) -> list[str]:
    lines = []
    if ported.missing:
        lines += ["PARTIAL: this config is not the run of its recipe. What is missing:"]
        lines += [*(f"- {sentence}" for sentence in ported.missing), ""]
    objective = config.recipe.train.objective
    kind = objective if asked.tool == "trl" and objective in RUN else asked.tool
    way = (SPREAD if config.devices > 1 else RUN)[kind]
    name = Path(ported.files[0]).name
    lines.append(f"Written by `recipe port --to {asked.tool}` from {name}: {summary(ported.rows)}.")
    return [*lines, f"Run it: {way.format(objective=objective, config=asked.place.name)}"]
