"""Read a Python script or a notebook as syntax, without running it, and find the trainer's arguments.

Statements are followed in order, with the values in them. A value that depends on something else (an input,
the environment, a download) is Unknown. The arguments of the known constructors become a Source in the keys
of TRL's command line. A notebook's places are those in the .ipynb file itself: the line and column of the
text that holds the code. So all places are of one kind, and an editor finds them.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import warnings
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from recipec.compiler.wording import listing, plural
from recipec.port import fstrings
from recipec.port.copies import Copier
from recipec.port.follow import (
    CONFIG,
    OVERLONG,
    PATH,
    STOPPING,
    STOPS,
    TRAINERS,
    UNSLOTH_COLLATOR,
    Follower,
)
from recipec.port.hf_argument_parser import Given
from recipec.port.keys import defaults_of, words
from recipec.port.meaning import distillation
from recipec.port.meaning.images import AFTERWARDS
from recipec.port.meaning.scripts import (
    ANSWERED,
    UNSLOTH,
    UNSLOTH_LORA,
    Chat,
    Column,
    Reward,
    Rows,
    Text,
    before_hand,
    is_content,
)
from recipec.port.read import ScriptText, Tree, conceal, parse_json, unparsed
from recipec.port.refusals import E1149, E1150, E1171
from recipec.port.script_values import NOTHING, Arg, Function, Known, Made, Row, Unknown
from recipec.port.source import Script, Source, join
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic, Span
from recipec.spec.load import display, read_text
from recipec.spec.yaml_document import Refused

MAX_BYTES = 16 << 20
"""The largest script or notebook that is read, in bytes. Pictures in a notebook's outputs count too."""
MOST_VALUES = 10_000
"""The most values in one argument."""
SECRET = re.compile(
    r"(^|_)(hf|hub|auth|access|api|wandb|secret)_?(token|key)$|^(token|key|api_key)$|passw", re.I
)
"""Matches names of arguments and variables whose texts are never shown."""

RENAMED: Mapping[str, Mapping[str, str]] = {
    "model": {"model_name": "model_name_or_path", "revision": "model_revision", "torch_dtype": "dtype"}
    | {"pretrained_model_name_or_path": "model_name_or_path", "max_seq_length": "max_length"}
    | {"use_gradient_checkpointing": "gradient_checkpointing"},
    "lora": {
        "r": "lora_r",
        "target_modules": "lora_target_modules",
        "modules_to_save": "lora_modules_to_save",
    }
    | {"task_type": "lora_task_type", "target_parameters": "lora_target_parameters"}
    | {"use_gradient_checkpointing": "gradient_checkpointing"},
    "bnb": {"bnb_4bit_use_double_quant": "use_bnb_nested_quant"},
    "trainer": {"max_seq_length": "max_length"},
    "collator": {"train_on_responses_only": "assistant_only_loss", "max_seq_length": "max_length"}
    | {"instruction_part": "turns", "response_part": "turns", "last_response_only": "last_turn"},
}
"""By constructor: arguments that have another name on TRL's command line."""


TEACHER = "teacher_model"
"""The argument of GKDTrainer for the teacher."""
ARGUMENTS = "arguments"
"""The section of a Source for the arguments that only a script's own lines read."""
CHOOSE = "choose one:"
"""The beginning of a help that lists the runs of a file."""
SUFFIXES = (".py", ".ipynb")
NO_TRAINER = "constructs no trainer that recipec reads"


def read_script(
    path: Path, file_arguments: Source | None = None, trainer: int | None = None
) -> tuple[Source | None, list[Diagnostic]]:
    """Read the run of a script or a notebook, in the keys of TRL's command line, or None if it has none.

    Args:
        given: the file of the arguments that the script may parse.
        trainer: the number of the trainer to read, from 1, if the script constructs several.
    """
    text, problem = read_text(path, "a script", MAX_BYTES, "a Python script or a notebook", marked=True)
    if problem is not None:
        return None, [problem]
    tree = Tree(text, display(path))
    try:
        source = _source(tree, path.suffix.lower() == ".ipynb", file_arguments, trainer)
    except Refused as refused:
        return None, [refused.diagnostic]
    return replace(source, path=path), []


def _source(tree: Tree, notebook: bool, file_arguments: Source | None, trainer: int | None) -> Source:
    code = ScriptText(tree)
    if notebook:
        _cells(code)
    else:
        tree.lines = re.split(r"\r\n|[\n\r]", conceal(tree.text))
        for number, line in enumerate(re.split(r"\r\n|[\n\r]", tree.text)):
            code.add(line, number, list(range(len(line))))
    module = _parsed(code)
    _hide(code, module)
    parsed = Given(file_arguments, reads=_attributes(module)) if file_arguments else None
    names = ChainMap[str, Any]({})
    follower = Follower(code, parsed, Copier(code, module, names))
    follower.block(module.body, names)
    if not follower.trainers and not follower.others:
        follower.uncalled(module, names)
    return _Assembly(code, follower, trainer).source()


def _attributes(module: ast.Module) -> frozenset[str]:
    """Return the names of all attributes that a script reads."""
    nodes = (node for node in ast.walk(module) if isinstance(node, ast.Attribute))
    return frozenset(node.attr for node in nodes if isinstance(node.ctx, ast.Load))


E1179 = Code(
    "E1179",
    "not valid Python",
    cause="The text breaks Python 3's grammar at the place shown, or the notebook has no cells.",
    cure="Correct it. 2to3 converts a script of Python 2.",
)


def _parsed(code: ScriptText) -> ast.Module:
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            text = "\n".join(code.lines) + "\n"
            try:
                module: ast.Module = compile(text, code.tree.file, "exec", flags)
            except SyntaxError:
                newer = fstrings.parsed(text, code.tree.file, flags) if sys.version_info < (3, 12) else None
                if newer is None:
                    raise
                module = newer
    except SyntaxError as error:
        span = code.at(error.lineno or 1, max((error.offset or 1) - 1, 0))
        help = "Python 3 refuses it too; 2to3 converts a script of Python 2"
        raise code.tree.refused(E1179, f"not valid Python: {error.msg}", help, span) from None
    except (ValueError, RecursionError, MemoryError):
        message = "not valid Python: it has a NUL character, or brackets are nested too deep"
        raise code.tree.refused(E1179, message, "is it a script?", code.tree.span(0, 0)) from None
    return module


_ESCAPE = re.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u....|\\.|.", re.S)
_MAGIC = re.compile(r"(\s*)((?:[\w, ]+=\s*)?[%!?].*|\w[\w.]*\?{1,2}\s*)$")
_WHOLE = re.compile(r"\s*%%(?!capture|time|timeit|prun)")


def _cells(code: ScriptText) -> None:
    """Collect a notebook's code cells. Lines that are not Python become blank, so that places are right."""
    tree = code.tree
    data = parse_json(tree)
    cells = data.get("cells") if isinstance(data, dict) else None
    if not isinstance(cells, list):
        message = f"{tree.file} is not a notebook: it has no list of cells"
        help = "save it as a notebook of version 4; jupyter nbconvert --to notebook converts an older one"
        raise tree.refused(E1179, message, help, tree.span(0, 0))
    raw = re.split(r"\r\n|[\n\r\x85\u2028\u2029]", tree.text)
    for number, cell in enumerate(cells):
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        data_set = cell.get("source")
        texts = (
            [(f"[{i}]", text) for i, text in enumerate(data_set)]
            if isinstance(data_set, list)
            else [("", data_set)]
        )
        pending: list[tuple[str, int, int]] = []
        for path, text in texts:
            span = tree.spans.get(f"cells[{number}].source{path}")
            if not isinstance(text, str) or span is None:
                continue
            written = raw[span.line - 1][span.column : span.column + span.length - 2]
            columns = [span.column + m.start() for m in _ESCAPE.finditer(written)]
            characters = [_decoded(m[0]) for m in _ESCAPE.finditer(written)]
            pending += [(c, span.line - 1, at) for c, at in zip(characters, columns, strict=True)]
        _cell(code, pending)


def _decoded(text: str) -> str:
    plain = {"\\n": "\n", "\\t": "\t", "\\r": "", '\\"': '"', "\\\\": "\\", "\\/": "/"}
    character = plain.get(text)
    if character is None:
        character = text if text[:2] != "\\u" else chr(int(text[2:6], 16)) if len(text) == 6 else "\ufffd"
    return character


def _cell(code: ScriptText, characters: list[tuple[str, int, int]]) -> None:
    line: list[tuple[str, int, int]] = []
    blank = goes_on = False
    first = True
    for part in [*characters, ("\n", 0, 0)]:
        if part[0] != "\n":
            line += [part] if part[0] else []
            continue
        text = "".join(c for c, _, _ in line)
        if first and text.strip():
            blank, first = _WHOLE.match(text) is not None, False
        magic = _MAGIC.match(text)
        if blank or goes_on or magic:
            goes_on = (goes_on or magic is not None) and text.rstrip().endswith("\\")
            indent = magic[1] if magic and not blank else ""
            name = re.match(r"\s*(\w+)\s*=", text) if magic and not blank else None
            text = f"{indent}{name[1] if name else '_'} = __shell__" if magic and not blank else ""
        code.add(text, line[0][1] if line else part[1], [at for _, _, at in line])
        line = []


def _hide(code: ScriptText, module: ast.Module) -> None:
    """Replace texts that are assigned to secret-sounding names by stars."""
    for node in ast.walk(module):
        named: list[tuple[str, Any]] = []
        if isinstance(node, ast.Call):
            named = [(keyword.arg or "", keyword.value) for keyword in node.keywords]
            if isinstance(node.func, ast.Name | ast.Attribute) and unparsed(node.func).endswith("login"):
                named += [("token", argument) for argument in node.args]
        elif isinstance(node, ast.Assign):
            named = [(unparsed(target).strip("\"'])"), node.value) for target in node.targets]
            named = [(re.split(r"[\"'.\[]", name)[-1], value) for name, value in named]
        for name, value in named:
            if SECRET.search(name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                span, number = code.span(value), value.lineno - 1
                column = len(code.lines[number].encode()[: value.col_offset].decode(errors="ignore"))
                lines, places = (
                    (code.tree.lines, code.lines),
                    ((span.line - 1, span.column - 1), (number, column)),
                )
                for text_line, (line, start) in zip(lines, places, strict=True):
                    end = start + (span.length if text_line is code.tree.lines else len(value.value) + 2)
                    stars = re.sub(r"[^\"'\\]", "*", text_line[line][start:end])
                    text_line[line] = text_line[line][:start] + stars + text_line[line][end:]
                value.value = "*" * max(len(value.value), 1)


UNFOLLOWED = words(
    "callbacks compute_metrics preprocess_logits_for_metrics optimizers optimizer_cls_and_kwargs "
    "eval_dataset compute_loss_func model_init ref_model device_map max_memory report_to data_collator"
)
"""Arguments that are shown as written if they are not constants."""
FOREIGN = re.compile(r"(Reward|BCO|PPO\w*|OnlineDPO|XPO|NashMD|PRM|SDPO|SDFT|TPO|GOLD)Trainer")
"""Matches TRL's trainers without a counterpart."""


UNCHANGED = words(
    "use_cache pretraining_tp pad_token_id bos_token_id eos_token_id torch_dtype dtype "
    "gradient_checkpointing _name_or_path _attn_implementation id2label label2id"
)
"""Settings of a model's config that do not affect what is learned, or that TRL's arguments repeat."""


def changed_config(model: Made) -> dict[str, Arg]:
    """Return the settings that the script assigns to a loaded model's config, as one argument."""
    config = model.told["config"].value if "config" in model.told else model
    changed_keys = {
        key: arg for key, arg in config.args.items() if config is not model and key not in UNCHANGED
    }
    first = next(iter(changed_keys.values()), None)
    return {"model_config": replace(first, value=", ".join(changed_keys))} if first else {}


def unsloth_lengths(
    trainer: Mapping[str, Arg], model: Mapping[str, Arg], objective: str
) -> tuple[dict[str, Arg], dict[str, Arg], int]:
    """Return the two constructors' arguments without the length that does not apply, and the default length.

    Unsloth (models/rl.py) uses the shorter one of the model's and the trainer's lengths. In SFT, a max_length
    equal to TRL's default is ignored; for preferences, the default counts.
    """
    trainer, model = dict(trainer), dict(model)
    if objective in ("grpo", "rloo"):  # whose prompts and completions have lengths of their own
        return trainer, model, UNSLOTH["max_length"]
    if objective == "sft" and "max_length" in trainer and trainer["max_length"].value == TRL_LENGTH:
        del trainer["max_length"]
    length = UNSLOTH["max_length"] if objective == "sft" else TRL_LENGTH
    of_model = model["max_seq_length"].value if "max_seq_length" in model else UNSLOTH["max_length"]
    name = next((key for key in ("max_seq_length", "max_length") if key in trainer), None)
    of_run = trainer[name].value if name else length if objective != "sft" else None
    if isinstance(of_model, int) and isinstance(of_run, int):
        if of_run < of_model:
            model.pop("max_seq_length", None)
        elif name:
            del trainer[name]
    return trainer, model, length


def unsloth_groups(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return Unsloth's defaults for the keys of GRPO, which depend on the loss (models/rl.py)."""
    loss = str(arguments.get("loss_type") or "dapo").lower()
    defaults: dict[str, Any] = {
        "beta": 0.0 if loss in ("dapo", "dr_grpo") else 0.001,
        "vllm_importance_sampling_correction": False,
        "router_aux_loss_coef": 0.0,
    }
    if loss == "dapo" and "loss_type" in arguments:
        defaults |= {"mask_truncated_completions": True, "epsilon_high": 0.28}
    if loss == "cispo":
        defaults["epsilon_high"] = 5.0
    elif loss == "dr_grpo":
        defaults["scale_rewards"] = "none"
    return defaults


TRL_LENGTH = 1024
"""TRL's default for max_length."""


E1175 = Code(
    "E1175",
    "script without a known trainer",
    cause="The script does not construct SFTTrainer, UnslothTrainer, DPOTrainer, ORPOTrainer, "
    "CPOTrainer, KTOTrainer, GRPOTrainer, RLOOTrainer, GKDTrainer or Trainer with a language model. It "
    "trains in its own loop, with another trainer or kind of model, or not at all.",
    cure="Port the script that constructs the trainer.",
)

E1176 = Code(
    "E1176",
    "script with several runs",
    cause="The script constructs several trainers, or one in a loop. A recipe is one run.",
    cure="Choose one with `--trainer N`. Split a script that trains in a loop into one for each run.",
)

E1177 = Code(
    "E1177",
    "training arguments outside the script",
    cause="The trainer's arguments are parsed from a command line or a file, or belong to a class "
    "that the script defines.",
    cure="Name the file with the values after the script: `recipe port train.py config.yaml`. Or use "
    "the library's own class.",
)


@dataclass
class _Assembly:
    code: ScriptText
    follower: Follower
    chosen: int | None = None
    data: dict[str, Any] = field(default_factory=dict)
    spans: dict[str, Span] = field(default_factory=dict)
    keys: dict[str, Span] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)

    def source(self) -> Source:
        """Return the complete run as a Source."""
        trainer = self.trainer()
        passed = dict(trainer.args)
        config, model = passed.pop("args", None), passed.pop("model", None)
        named = model.value if model else None
        arguments = self.arguments(config) if config is not None else {}
        lora = passed.pop("peft_config", None)
        tool = "Trainer" if trainer.kind == "Trainer" else "TRL"
        of_model: Mapping[str, Arg] = {}
        if isinstance(named, Made):
            self.made_by(named)
            tool = "Unsloth" if named.kind == "unsloth" else tool
            lora = named.told.get("lora") or lora
            of_model = {**named.args, **changed_config(named)}
        if "after" in trainer.told:
            earlier = trainer.told["after"].value.node
            why = f"the trainer on line {self.code.span(earlier).line}, which trains the model first"
            keys = [key for key in ("model_name", PATH) if key in of_model] or ["model_name"]
            first = of_model.get(keys[0], trainer.told["after"])
            of_model = {**of_model, keys[0]: replace(first, value=Unknown(why))}
        defaults = self.defaults(tool, named, lora.value if lora else None, trainer)
        if tool == "Unsloth":
            arguments, of_model, length = unsloth_lengths(arguments, of_model, TRAINERS[trainer.kind])
            defaults["max_length"] = length
            if trainer.kind == "GRPOTrainer":
                defaults |= unsloth_groups({key: arg.value for key, arg in arguments.items()})
        loading = arguments.pop(distillation.KWARGS, None)
        self.put_all("trainer", arguments)
        self.put_all("model", of_model)
        if model is not None and not isinstance(named, Made):
            self.put("model_name_or_path", model)
        trains = [frozen for frozen in self.follower.frozen if frozen.value is not False or lora is None]
        if trains and "ref_model" not in passed:
            self.put("requires_grad", trains[0])
        if lora is not None and isinstance(lora.value, Made):
            self.put_all("lora", lora.value.args)
        elif lora is not None and lora.value is not None:
            message = f"`{self.code.shown(lora.node)}` is not a LoraConfig that the script constructs"
            raise self.refused(
                E1149, message, "a recipe trains LoRA's adapters, or the whole model", lora.node
            )
        path = of_model.get("model_name", of_model.get(PATH, model))
        tokenizers = [passed.pop(key, None) for key in ("tokenizer", "processing_class")]
        tokenizer_value = next(
            (value.value for value in tokenizers if value and isinstance(value.value, Made)), None
        )
        if tokenizer_value is None and tool == "Trainer" and len(self.follower.tokenizers) == 1:
            tokenizer_value = self.follower.tokenizers[0]  # it made the rows
        if tokenizer_value is not None:
            statements = dict(tokenizer_value.args)
            if "tokenizer" in statements and path and _alike(statements["tokenizer"], path):
                del statements["tokenizer"]
            self.put_all("tokenizer", statements)
        reference = passed.get("ref_model")
        if reference and isinstance(reference.value, Made) and PATH in reference.value.args:
            other = reference.value.args[PATH]
            alike = path is not None and _alike(other, path)
            passed["ref_model"] = replace(reference, value=None if alike else other.value)
        self.teacher(passed.pop(TEACHER, None), loading)
        train, function = passed.pop("train_dataset", None), passed.pop("formatting_func", None)
        held = passed.pop("eval_dataset", None)
        rewards = self.rewards(passed)
        self.put_all("trainer", {**passed, **trainer.told})
        rows = self.sets(train, held, function, trainer)
        notes = self.beside()
        order = sorted(self.data, key=lambda key: (self.keys[key].line, self.keys[key].column))
        tree = self.code.tree
        read = self.follower.file_arguments
        taken = read is not None and read.used
        script = Script(TRAINERS[trainer.kind], tool, defaults, rows, rewards, notes, taken)
        return Source(
            Path(tree.file),
            tree.file,
            {key: self.data[key] for key in order},
            self.spans,
            self.keys,
            {path: kind for path, kind in tree.secrets.items() if path in self.spans},
            script=script,
            unknown=self.unknown,
        )

    def rewards(self, passed: dict[str, Arg]) -> list[Reward] | None:
        """Return the reward functions, whose argument becomes a list of their names."""
        arg = passed.get("reward_funcs")
        if arg is None or isinstance(arg.value, str):
            return None
        values = list(arg.value) if isinstance(arg.value, list | tuple) else [arg.value]
        if isinstance(arg.value, Unknown):
            return None
        rewards = []
        for number, value in enumerate(values, 1):
            name = self.reward_name(value, f"reward_{number}")
            named = isinstance(value, str | Known) or (isinstance(value, Made) and value.kind == "penalty")
            rewards.append(Reward(name, why="it is not a function of the script", named=named))
            if isinstance(value, Function) and self.follower.copier:
                copy, why = self.follower.copier.copy(value, name)
                rewards[-1] = Reward(name, copy, why)
        passed["reward_funcs"] = replace(arg, value=[reward.name for reward in rewards])
        return rewards

    def reward_name(self, value: Any, usual: str) -> str:
        if isinstance(value, str):
            return value
        if isinstance(value, Known):
            copier, name = self.follower.copier, value.name
            module = copier.origin(name) if copier else ""
            return f"{module}.{name}" if module and not module.startswith("trl") else name.rpartition(".")[2]
        if isinstance(value, Made) and value.kind == "penalty":
            arguments = {
                key: argument.value for key, argument in value.args.items() if isinstance(argument.value, int)
            }
            return f"{OVERLONG}({json.dumps(arguments)})"
        return getattr(value.node, "name", usual) if isinstance(value, Function) else usual

    def teacher(self, model: Arg | None, loading: Arg | None) -> None:
        """Set the teacher's name, and the section of how it is loaded.

        Args:
            model: the teacher, loaded by the script or only named.
            loading: TRL's arguments for a teacher that is only named.
        """
        if model is None:
            return
        if isinstance(model.value, Made):
            self.made_by(model.value)
            args = dict(model.value.args)
            model = args.pop(PATH, model)
        elif loading is not None and isinstance(loading.value, dict):
            args = {str(key): Arg(value, loading.node, loading.key) for key, value in loading.value.items()}
        else:
            args = {}
            if loading is not None:
                self.put(distillation.KWARGS, loading)
        self.put(distillation.TEACHER, model)
        if args:
            self.section(distillation.KWARGS, args, loading or model)

    def section(self, key: str, args: Mapping[str, Arg], place: Arg) -> None:
        """Set a section of arguments."""
        inner = _Assembly(self.code, self.follower)
        inner.put_all(key, args)
        self.data[key] = inner.data
        self.keys[key], self.spans[key] = self.key_span(place), self.code.span(place.node)
        self.keys |= {join(key, name): span for name, span in inner.keys.items()}
        self.spans |= {join(key, name): span for name, span in inner.spans.items()}
        self.unknown |= {join(key, name): why for name, why in inner.unknown.items()}

    def beside(self) -> dict[str, str]:
        """Set the arguments of a file that became no key of the run, and return what becomes of them."""
        file_arguments = self.follower.file_arguments
        if file_arguments is None or not file_arguments.used:
            return {}
        places = {(span.file, span.line, span.column) for span in self.keys.values()}
        notes = {}
        for name, arg in file_arguments.args.items():
            span = self.code.span(arg.key)
            if (span.file, span.line, span.column) not in places:
                notes[name] = file_arguments.notes[name]
                self.data.setdefault(ARGUMENTS, {})[name] = arg.value
                self.keys[join(ARGUMENTS, name)] = span
                self.keys.setdefault(ARGUMENTS, span)
                self.spans[join(ARGUMENTS, name)] = self.code.span(arg.node)
        return notes

    def refused(self, code: Code, message: str, help: str, node: Any = None) -> Refused:
        span = self.code.span(node) if node is not None else self.code.tree.span(0, 0)
        return self.code.tree.refused(code, message, help, span)

    def trainer(self) -> Made:
        """Return the script's only trainer.

        Raises:
            Refused: the script has none, several, or one without a counterpart.
        """
        trainers, others, file = self.follower.trainers, self.follower.others, self.code.tree.file
        every, chosen = self.follower.every, self.chosen
        if (chosen is None and len(every) > 1) or (every and (chosen or 1) > len(every)):
            message = f"{file} has {plural(len(every), 'trainer')}, and a recipe is for one run"
            if chosen is not None:
                message = f"{file} has {plural(len(every), 'trainer')}, and no trainer {chosen}"
            lines = (
                (candidate.kind.removeprefix("class "), self.code.span(candidate.node).line)
                for candidate in every
            )
            ways = (f"--trainer {n}: {kind} (line {line})" for n, (kind, line) in enumerate(lines, 1))
            help = "\n".join((CHOOSE, *(f"  {way}" for way in ways)))
            raise self.refused(E1176, message, help, every[min(1, len(every) - 1)].node)
        every = every[(chosen or 1) - 1 :][:1]
        if every and "unsure" in every[0].told:
            message = f"{file} trains in a loop, and a recipe is for one run"
            raise self.refused(E1176, message, "make a script of each run, and port each", every[0].node)
        trainers, others = (
            [candidate for candidate in kind if candidate in every] for kind in (trainers, others)
        )
        if others:
            kind, read = others[0].kind, listing([f"`{name}`" for name in TRAINERS], "or")
            if FOREIGN.fullmatch(kind):
                message = f"this is a run of TRL's {kind}, which has no counterpart in recipes"
                raise self.refused(E1171, message, f"recipes train like {read}", others[0].node)
            message = (
                f"{file} trains with `{kind.removeprefix('class ')}`, and recipec does not follow its steps"
            )
            raise self.refused(E1175, message, f"recipec reads runs of {read}", others[0].node)
        if not trainers:
            read = listing([f"`{name}`" for name in TRAINERS], "or")
            help = f"recipec reads scripts that construct {read}; for another script, port its config"
            raise self.refused(E1175, f"{file} {NO_TRAINER}", help)
        return trainers[0]

    def made_by(self, model: Made) -> None:
        seen = re.search(r"[\"'](images?|audios?|videos?|pixel_values)[\"']", "\n".join(self.code.lines))
        if seen and re.search("ImageTextToText|ConditionalGeneration", self.code.shown(model.node)):
            loaded = self.code.shown(model.node)
            message = f"`{loaded}` with {seen[1]}, which recipe port does not carry over from a script"
            raise self.refused(E1150, message, AFTERWARDS, model.node)
        if model.kind.startswith("class "):
            name = model.kind.removeprefix("class ")
            message = f"`{name}` does not load a text-only language model, which is what recipec trains"
            help = "recipes train models that AutoModelForCausalLM loads"
            if "Peft" in name:
                message = f"`{name}` loads adapters, which recipec does not follow in a script"
                help = (
                    "give the trainer the base model, and write the adapters as lora.start_from of the recipe"
                )
            raise self.refused(E1175, message, help, model.node)

    def arguments(self, config: Arg) -> dict[str, Arg]:
        """Return the trainer's arguments, including those of model_init_kwargs.

        Raises:
            Refused: the script does not determine them.
        """
        instance = config.value
        if not isinstance(instance, Made) or not CONFIG.fullmatch(instance.kind):
            if isinstance(instance, Made) and instance.kind.startswith("class "):
                message = f"the training arguments have their own class, {instance.kind[6:]}"
                help = f"construct the class that {instance.kind[6:]} inherits from, with its values"
                raise self.refused(E1177, message, help, config.node)
            where = instance.why if isinstance(instance, Unknown) else "the command line"
            message = f"the training arguments are not in the script: they come from {where}"
            file, parsed = self.code.tree.file, isinstance(instance, Made) and instance.kind == "cli"
            help = "write the values into the script"
            if parsed and self.follower.file_arguments is None:
                help = f"name the file of its arguments too: recipe port {file} config.yaml; or {help}"
            raise self.refused(E1177, message, help, config.node)
        script_class = instance.told["own"].value if "own" in instance.told else ()
        out = {key: arg for key, arg in instance.args.items() if key not in script_class}
        inner = out.get("model_init_kwargs")
        if inner is not None and isinstance(inner.value, dict):
            del out["model_init_kwargs"]
            self.put_all("model", {str(k): Arg(v, inner.node, inner.key) for k, v in inner.value.items()})
        return out

    def defaults(self, tool: str, model: Any, lora: Any, trainer: Made) -> dict[str, Any]:
        """Return the defaults that differ from those of TRL's command line."""
        settings: dict[str, Any] = {"use_peft": isinstance(lora, Made)}
        if tool == "Trainer":
            settings |= {
                **defaults_of("trainer", "training_arguments"),
                "optim": "adamw_torch_fused",
                "max_length": None,
            }
        if isinstance(model, Made):
            settings["dtype"] = "auto"
        if isinstance(lora, Made):
            peft = defaults_of("peft", "lora")
            settings |= {f"lora_{key}": peft[key] for key in ("r",)}
            settings |= {key: peft[key] for key in ("lora_alpha", "lora_dropout")}
        settings["bnb_4bit_quant_type"] = "fp4"  # the default of BitsAndBytesConfig
        if tool == "Unsloth":
            settings |= UNSLOTH
            settings |= UNSLOTH_LORA if isinstance(lora, Made) else {}
            wide = {key: argument.value for key, argument in model.args.items()}
            settings["load_in_4bit"] = not any(
                wide.get(k) for k in ("full_finetuning", "load_in_16bit", "load_in_8bit")
            )
            if wide.get("full_finetuning"):
                settings["use_peft"] = False
            if isinstance(lora, Made):
                off = [key for key in ("attention", "mlp") if key_is_off(lora, f"finetune_{key}_modules")]
                parts = {
                    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
                    "mlp": ["gate_proj", "up_proj", "down_proj"],
                }
                settings["lora_target_modules"] = [
                    n for key, names in parts.items() if key not in off for n in names
                ]
        return settings

    def put_all(self, kind: str, args: Mapping[str, Arg]) -> None:
        for name, arg in args.items():
            if name == "quantization_config" and isinstance(arg.value, Made):
                self.put_all("bnb", arg.value.args)
            elif name != "model" and not (name == "peft_config" and arg.value is None):
                self.put(RENAMED.get(kind, {}).get(name, name), arg)

    def put(self, key: str, arg: Arg) -> None:
        """Set a key of the run. Of two arguments for one key, the last one counts."""
        tree, value = self.code.tree, arg.value
        for known in [k for k in self.unknown if k == key]:
            del self.unknown[known]
        self.keys[key] = self.key_span(arg)
        self.spans[key] = self.code.span(arg.node)
        if isinstance(value, Made) and value.kind == UNSLOTH_COLLATOR:
            self.put_all("collator", value.args)
        if key == "data_collator" and isinstance(value, Made | Known):
            value = value.kind if isinstance(value, Made) else value.name.rpartition(".")[2]
        for callback in value if key == "callbacks" and isinstance(value, list) else ():
            if isinstance(callback, Made) and callback.kind == STOPPING:
                node: Any = callback.node
                for name, argument in {STOPS[0]: Arg(1, node, node), **callback.args}.items():
                    self.put(name, argument)
        if key == "gradient_checkpointing" and isinstance(value, str):
            value = True
        plain = _plain(value)
        if plain is NOTHING and key not in UNFOLLOWED:
            why = (
                value.why
                if isinstance(value, Unknown)
                else f"`{self.code.shown(arg.node)}` on line {self.keys[key].line}"
            )
            self.unknown[key] = why
        if plain is NOTHING:
            plain = self.code.shown(arg.node)
        if isinstance(plain, str):
            plain = tree.value(plain, key)
        self.data[key] = plain
        if isinstance(plain, dict):
            nodes = arg.node.values if isinstance(arg.node, ast.Dict) else []
            for name, inner in zip(plain, nodes or [arg.node] * len(plain), strict=False):
                self.spans[join(key, name)] = self.code.span(inner)

    def key_span(self, arg: Arg) -> Span:
        key = arg.key
        if isinstance(key, ast.keyword) and key.arg:
            return self.code.span(key, len(key.arg))
        return self.code.span(key)

    def sets(self, train: Arg | None, held: Arg | None, function: Arg | None, trainer: Made) -> Rows | None:
        """Set the keys of the data sets, and return what functions made of the rows."""
        data = train.value if train else None
        if train is None:
            return None
        if isinstance(data, Made) and data.kind == "parts" and "train" in data.args:
            data = data.args["train"].value
        if not isinstance(data, Made) or data.kind not in ("data", "all", "held"):
            self.put(
                "dataset_name",
                replace(
                    train,
                    value=data if isinstance(data, Unknown) else Unknown(f"`{self.code.shown(train.node)}`"),
                ),
            )
            return None
        several = [data, *(data.told["others"].value if "others" in data.told else [])]
        other = held.value if held else None
        same = isinstance(other, Made) and other.kind in ("data", "all") and _path(other) == _path(data)
        if isinstance(other, Made) and other.kind == "data" and same:
            self.put("dataset_test_split", other.args["split"])
        elsewhere = (
            held is not None
            and other is not None
            and not same
            and not (isinstance(other, Made) and other.kind == "held")
        )
        if elsewhere and held is not None:
            self.put("eval_dataset", held)
        below = {"data_files", "data_dir", "revision"}.intersection(data.args)
        listed = len(several) > 1 or elsewhere or below or "test_split_size" in data.told
        if listed:
            self.data["datasets"] = []
            self.keys["datasets"] = self.spans["datasets"] = self.code.span(data.node)
            for number, data_set in enumerate(several):
                inner = _Assembly(self.code, self.follower)
                inner.put_all("data", data_set.args)
                self.data["datasets"].append(inner.data)
                prefix = f"datasets[{number}]."
                self.keys |= {prefix + key: span for key, span in inner.keys.items()}
                self.spans |= {prefix + key: span for key, span in inner.spans.items()}
                self.unknown |= {prefix + key: why for key, why in inner.unknown.items()}
        else:
            names = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
            for key, arg in data.args.items():
                self.put(names.get(key, key), arg)
        statements = {key: arg for key, arg in data.told.items() if key not in ("others", "function")}
        self.put_all("data", statements)
        return self.rows(data, function, trainer)

    def rows(self, data: Made, function: Arg | None, trainer: Made) -> Rows | None:
        steps, columns = data.steps, dict(data.rows)
        column = self.data.get("dataset_text_field") or "text"
        key = function or data.told.get("function")
        if key is None:
            return None
        self.put("formatting_func", key if function is None else replace(key, value=_name_of(key.value)))
        if function is not None:
            follower = self.follower
            out: Any = Unknown("it is not a function of the script")
            if isinstance(function.value, Function):
                out = follower.inline(function.node, function.value, [Row(columns)], {})
                out = out[0] if isinstance(out, list) and len(out) == 1 else out
                if not isinstance(out, Text | Column | Chat) or not is_content(out):
                    why = out.why if isinstance(out, Unknown) else "it does not return a text"
                    before, _ = before_hand(columns)
                    steps = (*steps, *before, follower.by_hand(function.value, why))
                    out = Column("text")
            content = out if not isinstance(out, Unknown) else None
        elif TRAINERS[trainer.kind] in ("grpo", "rloo"):
            content = dict(columns)
        elif TRAINERS[trainer.kind] not in ANSWERED:
            names = ("prompt", "chosen", "rejected")
            content = {
                name: columns.get(name, Column(name)) for name in names if name in columns or steps or columns
            }
        else:
            talk = next((columns[name] for name in ("messages", "conversations") if name in columns), None)
            talk = Chat(talk) if isinstance(talk, Column) else talk
            pair = {name: columns[name] for name in ("prompt", "completion") if name in columns}
            content = columns.get(column) or columns.get("text") or talk or (pair if len(pair) == 2 else None)
            if content is None and not steps:
                return None
            if content is None:
                content = Chat(Column("messages")) if "assistant_only_loss" in self.data else Column(column)
        out = Rows(content, steps, ("formatting_func",))
        for copied in out.by_hand:
            if seen := re.search(r"\b(images?|audios?|videos?)\b", "\n".join(copied.lines)):
                message = (
                    f"`{copied.name}` is about {seen[1]}, which recipe port does not carry over from a script"
                )
                raise Refused(Diagnostic(E1150, message, "formatting_func", AFTERWARDS, copied.span))
        return out


def key_is_off(instance: Made, key: str) -> bool:
    """Return whether a switch that is on by default is turned off."""
    return key in instance.args and instance.args[key].value is False


def _alike(left: Arg, other: Arg) -> bool:
    """Return whether two arguments have the same value, even if it is unknown."""
    return left.value == other.value or ast.dump(left.node) == ast.dump(other.node)


def _name_of(value: Any) -> str:
    return getattr(value.node, "name", "lambda") if isinstance(value, Function) else "formatting_func"


def _path(instance: Made) -> Any:
    return [instance.args[key].value for key in ("path", "name") if key in instance.args]


def _plain(value: Any, room: list[int] | None = None) -> Any:
    """Return a value as plain data, or NOTHING if it is not plain or contains too much."""
    room = room or [MOST_VALUES]
    room[0] -= 1
    if room[0] < 0 or not isinstance(value, str | int | float | bool | list | tuple | dict | None):
        return NOTHING
    if isinstance(value, list | tuple):
        items = []
        for item in value:
            items.append(_plain(item, room))
            if items[-1] is NOTHING:
                return NOTHING
        return items
    if isinstance(value, dict):
        inner = _plain(list(value.values()), room)
        return NOTHING if inner is NOTHING else dict(zip(map(str, value), inner, strict=True))
    return value
