"""Training commands of shell scripts: the config file that a command names, and the flags that override it.

`shell` reads the script's syntax. This module recognizes a command by its launcher and program, and turns it
into a Source in the keys of its tool's dialect, in which each flag has its place. Flags of launchers become
keys of accelerate.
"""

from __future__ import annotations

import os
import re
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from recipec.compiler.wording import listing, plural
from recipec.port import dialects, recognize
from recipec.port.dialects import open_instruct, trl
from recipec.port.keys import tools, words
from recipec.port.read import MAX_BYTES, Tree, parse_json, parse_yaml, read
from recipec.port.recognize import E1101, E1110, E1193
from recipec.port.refusals import E1171
from recipec.port.settle import put
from recipec.port.shell import MARKS, Shell, Statement, Unreadable, Word, shown, unknown
from recipec.port.source import Source, join, parts
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic, Span
from recipec.spec.load import display, read_text
from recipec.spec.overrides import E0031
from recipec.spec.yaml_document import Refused

SUFFIXES = (".sh", ".bash", ".zsh", ".slurm", ".sbatch", ".txt")
CONFIGS = (".yaml", ".yml", ".json")

SCRIPTS = "sft|dpo|orpo|kto|grpo|rloo|reward|cpo|gkd|online_dpo|nash_md|xpo|prm|bco|ppo"
PROGRAMS: tuple[tuple[str, str, str], ...] = (
    (rf"(?:.*/)?open_instruct/({'|'.join(open_instruct.SCRIPTS)})\.py", "open_instruct", "open-instruct"),
    (r"(?:.*/)?open_instruct/(?:olmo_core_finetune|reward_modeling)\.py", "", "open-instruct's others"),
    (rf"trl ({SCRIPTS})", "trl", "TRL"),
    (rf"-m trl\.scripts\.({SCRIPTS})", "trl", "TRL"),
    (rf"(?:.*/)?({trl.SEEING})\.py", "trl", "TRL"),
    (rf"(?:.*/)?(?:run_)?({SCRIPTS})(?:_lora|_train|_trainer)?\.py", "trl", "TRL"),
    (r"(?:llamafactory-cli|lmf) train", "llamafactory", "LLaMA-Factory"),
    (r"(?:.*/)?(?:train_bash|src/train)\.py|-m llamafactory\.\S+", "llamafactory", "LLaMA-Factory"),
    (r"axolotl train|-m axolotl\.cli\.train|(?:.*/)?scripts/finetune\.py", "axolotl", "Axolotl"),
    (r"tune run", "torchtune", "torchtune"),
    (r"litgpt finetune_adapter\w*|(?:.*/)?finetune/adapter\w*\.py", "", "litgpt's adapters"),
    (r"litgpt finetune\w*|(?:.*/)?finetune/(?:lora|full)\.py", "litgpt", "litgpt"),
    (r"(?:.*/)?run_clm\.py", "trainer", "Trainer"),
    (r"swift (?:sft|rlhf)|(?:.*/)?swift/cli/(?:sft|rlhf)\.py", "swift", "ms-swift"),
    (r"swift pt|(?:.*/)?swift/cli/pt\.py", "", "ms-swift's pre-training"),
    (r"megatron (?:sft|pt|rlhf)|(?:.*/)?swift/cli/\w+\.py", "", "ms-swift's Megatron"),
    (r"-m (?i:maxtext)\.\S*sft\S*|(?:.*/)?(?i:maxtext)/\S*sft\S*\.py", "maxtext", "MaxText"),
    (r"-m (?i:maxtext)\.\S+|(?:.*/)?(?i:maxtext)/\S+\.py", "", "MaxText's pre-training and RL"),
    (r"oumi train|-m oumi\.train", "oumi", "oumi"),
    (r"-m openrlhf\.\S+", "", "OpenRLHF"),
    (r"-m verl\.\S+", "", "verl"),
    (r"xtuner train", "", "XTuner"),
    (r"automodel finetune|(?:.*/)?nemo_automodel/recipes/llm/train_ft\.py", "automodel", "NeMo AutoModel"),
    (r"automodel \S+|(?:.*/)?nemo_automodel/\S+\.py", "", "NeMo AutoModel outside fine-tuning"),
    (r"-m tunix\.cli\.peft_main|(?:.*/)?peft_main\.py", "tunix", "Tunix"),
    (r"-m tunix\.\S+|tunix \S+", "", "Tunix's RL"),
    (r"(?:.*/)?(?:pretrain|finetune)_(?:gpt|llama)\.py", "", "Megatron-LM"),
    (r"(?:.*/)?[\w-]*(?:train|tune|sft|dpo|run_)[\w-]*\.py", "", ""),
)
"""Training programs, the dialect that reads their flags ("" for none), and the tool. The first match wins."""

WRAPPERS = words("srun nohup time exec sudo env uv poetry conda mamba pixi numactl nsys docker ! %%bash")
LAUNCHERS = ("accelerate", "torchrun", "deepspeed")
TOOLS = {
    program.partition(" ")[0] for words, _, _ in PROGRAMS for program in words.split("|") if " " in program
}
STARTS = {*LAUNCHERS, "python", "python3", "llamafactory-cli", "lmf", *TOOLS} - {"-m"}
SINGLE = ("axolotl", "torchtune", "maxtext", "oumi", "automodel", "litgpt", "tunix")
"""Dialects whose flags take exactly one value."""
HYDRA = ("torchtune", "maxtext", "llamafactory", "axolotl", "oumi", "tunix")
"""Dialects whose commands take KEY=VALUE arguments."""
OWN = {"maxtext": ("base.yml", "sft.yml"), "tunix": ("base_config.yaml",)}
"""Configs that the tools contain. A command may name them without a copy at hand."""
OVER = "override_config_file="
"""Tunix's argument for a config that overrides its base config."""
REPLACED = ("optimizer_config", "training_config", "model_config.lora_config")
"""Sections of Tunix's base config that are dropped completely if the command sets a key in them, or in the
section around them."""
SECTIONS = {
    "trl": (*trl.SCRIPTS, "script", "model"),
    "llamafactory": ("train",),
    "trainer": ("training_arguments",),
    "axolotl": ("config",),
    "swift": ("sft", "rlhf"),
    "open_instruct": ("sft", "dpo", "grpo"),
    "accelerate": ("launch",),
}
"""The tables with the types of flags, by dialect."""
BARE = words("m module multi_gpu standalone no_python no_ssh no_local_rank force_multi save_pid use_env")
"""Launchers' flags without a value."""
RENAMED = {
    "node_rank": "machine_rank",
    "master_addr": "main_process_ip",
    "master_port": "main_process_port",
    "nnodes": "num_machines",
    "num_nodes": "num_machines",
}
"""accelerate's names for the flags of torchrun and deepspeed."""
PER_NODE = ("nproc_per_node", "num_gpus", "nproc-per-node")
_VALUE = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?|[Tt]rue|[Ff]alse|TRUE|FALSE|null")
_SECRET = re.compile(
    r"(?i)((?:token|api_?key|access_?key|secret|password|passwd)\w*(?:=|\s+)[\"']?)([^\s\"'$][^\s\"']{3,})"
)
_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+|\[\d+\])*")
_PAIR = re.compile(r"~?[A-Za-z_][\w.\[\]-]*=")


@dataclass(frozen=True)
class Program:
    """A training command.

    Attributes:
        name: the program as it is called, "trl sft".
        dialect, tool, script: as in PROGRAMS.
        launcher, arguments: the launcher's flags, and the program's arguments, as words.
        head: the program's first word.
    """

    name: str
    dialect: str
    tool: str
    script: str | None
    launcher: tuple[Word, ...]
    arguments: tuple[Word, ...]
    head: Word
    statement: Statement


@dataclass(frozen=True)
class Command:
    """A command in the form that a port reads.

    Attributes:
        sources: the files, the main one first.
        dialect: the dialect of the files.
        script: the script of TRL, if the command names one.
        devices: the GPUs, if no file among the sources says it.
        taken: the files of the port's own command line that the command names.
    """

    sources: tuple[Source, ...]
    dialect: str
    script: str | None
    devices: int | None
    taken: frozenset[Path]


def is_command(path: Path) -> bool:
    """Return whether a path is a script of commands: by its suffix, or `-` for stdin."""
    return str(path) == "-" or path.suffix.lower() in SUFFIXES


def read_command(
    path: Path, number: int | None = None, chosen: str | None = None, beside: Sequence[Path] = ()
) -> tuple[Command | None, list[Diagnostic]]:
    """Read the training command of a script."""
    if str(path) == "-":
        text, problem = sys.stdin.read(MAX_BYTES + 1), None
    else:
        text, problem = read_text(path, "a script", MAX_BYTES, "a script with the command")
    if problem is not None:
        return None, [problem]
    script = _Script(path, "stdin" if str(path) == "-" else display(path), text, beside)
    try:
        return script.command(number, chosen), script.found
    except Refused as refused:
        return None, [*script.found, refused.diagnostic]


def _program(statement: Statement) -> Program | None:
    """Return the program that a statement runs, or None if it trains nothing."""
    words = _unwrapped(list(statement.words))
    names = [PurePosixPath(word.text.lstrip("!")).name for word in words]
    starts = [index for index, name in enumerate(names) if name in STARTS]
    if names[:2] == ["uv", "run"] and (
        files := [at for at, name in enumerate(names) if name.endswith(".py")]
    ):
        starts = [at for at in starts if at < files[0]] or files[:1]
    if not starts or (starts[0] > 0 and names[0] not in WRAPPERS):
        return None
    at, launcher = starts[0], list[Word]()
    head = words[at]
    while True:
        name = names[at] if at < len(names) else ""
        if name in LAUNCHERS and (name != "accelerate" or names[at + 1 : at + 2] == ["launch"]):
            begins = at + 1 + (name == "accelerate")
            at = _end_of_launcher(words, begins)
            launcher += words[begins:at]
        elif name in ("python", "python3"):
            at += 1
            while at < len(words) and re.fullmatch(r"-[uOBIsEW]+", words[at].text):
                at += 1
            if [word.text for word in words[at : at + 2]][1:] in (
                ["torch.distributed.run"],
                ["torch.distributed.launch"],
                ["accelerate.commands.launch"],
            ):
                begins = at + 2
                at = _end_of_launcher(words, begins)
                launcher += words[begins:at]
        else:
            break
    if at >= len(words):
        return None
    pair = words[at].text in ("-m", "--module") or not names[at].endswith(".py")
    called = " ".join(
        [words[at].text if not pair else names[at], *(word.text for word in words[at + 1 : at + 2])][
            : 1 + pair
        ]
    )
    called = called.replace("--module ", "-m ")
    rest = tuple(words[at + 1 + pair :])
    for pattern, dialect, tool in PROGRAMS:
        if match := re.fullmatch(pattern, called):
            kind = match[1] if match.groups() else None
            if tool == "torchtune" and not any(
                "finetune" in word.text or "dpo" in word.text for word in rest
            ):
                return None  # an evaluation, a generation, a quantization
            return Program(called, dialect, tool, kind, tuple(launcher), rest, head, statement)
    if called.endswith(".py") and (launcher or unknown(names[at])):
        return Program(called, "", "", None, tuple(launcher), rest, head, statement)
    return None


def _unwrapped(words: list[Word]) -> list[Word]:
    """Return the last command that open-instruct's mason.py is given to start elsewhere, or the words."""
    if not any(PurePosixPath(word.text).name == "mason.py" for word in words):
        return words
    last = max((at for at, word in enumerate(words) if word.text == "--" or word.text[:2] == "&&"), default=0)
    glued = replace(words[last], text=words[last].text[2:])
    return [*([glued] if glued.text else []), *words[last + 1 :]]


def _called(program: Program) -> str:
    """Return a command as a list names it: the program, and the config that it is given."""
    configs = [shown(word.text) for word in program.arguments if word.text.endswith(CONFIGS)]
    return " ".join([shown(program.name), *configs[:1]])


def _end_of_launcher(words: Sequence[Word], at: int) -> int:
    """Return the index of the word after the launcher's flags: its program."""
    while at < len(words):
        text = words[at].text
        if text in ("-m", "--module") or PurePosixPath(text).name in STARTS:
            return at
        if not text.startswith("-"):
            return at
        bare = text.lstrip("-").replace("-", "_")
        kind = _types("accelerate").get(bare, "")
        single = "=" in text or bare in BARE or kind == "bool"
        at += 1 if single else 2
    return at


def _types(tool: str) -> dict[str, str]:
    sections = tools().get(tool, {}).get("sections", {})
    return {
        key: str(row[0])
        for name in SECTIONS.get(tool, ())
        for key, row in sections.get(name, {}).items()
        if row
    }


@dataclass
class _Laid:
    """A config whose keys flags override."""

    data: dict[str, Any] = field(default_factory=dict)
    spans: dict[str, Span] = field(default_factory=dict)
    keys: dict[str, Span] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    shell: dict[str, str] = field(default_factory=dict)

    @classmethod
    def over(cls, source: Source | None) -> _Laid:
        if source is None:
            return cls()
        return cls(deepcopy(source.data), dict(source.spans), dict(source.keys), dict(source.secrets))

    def lay(
        self,
        key: str,
        value: Any,
        span: Span,
        secrets: Mapping[str, str] | None = None,
        at: Span | None = None,
    ) -> None:
        """Set a key, and replace its old value."""
        help = "set the section itself instead"
        key = shown(key) or '""'
        way = parts(key) if _KEY.fullmatch(key) else [key]  # not a name, so no key of any tool
        put(self.data, way, value, Diagnostic(E0031, f"`{key}` is not inside a section", key, help, span))
        self._forget(key)
        for path in _below(value, key):
            self.spans[path], self.keys[path] = at or span, span
        for path, what in (secrets or {}).items():
            self.secrets[key + path if path[:1] in ("", "[") else join(key, path)] = what

    def remove(self, key: str) -> None:
        """Remove a key, if it is there."""
        *way, last = parts(key) if _KEY.fullmatch(key) else [key]
        node: Any = self.data
        for part in way:
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.pop(last, None)
            self._forget(key)

    def _forget(self, key: str) -> None:
        for places in (self.spans, self.keys, self.secrets, self.shell):
            for known in [
                place for place in places if place == key or place.startswith((f"{key}.", f"{key}["))
            ]:
                places.pop(known)

    def source(self, path: Path, file: str) -> Source:
        return Source(path, file, self.data, self.spans, self.keys, self.secrets, shell=self.shell)


def _below(value: Any, path: str) -> Iterator[str]:
    """Yield the paths of a value and of everything in it."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _below(inner, join(path, str(key)))


E1181 = Code(
    "E1181",
    "several training commands",
    cause="The script runs more than one training command. A recipe is one run.",
    cure="Choose one with `--command N`. To chain stages, use the `merge.output` of one as the "
    "`model.id` of the next.",
)

E1182 = Code(
    "E1182",
    "no training command",
    cause="No command in the script is a training command of a known tool, or a launcher with a "
    "training script.",
    cure="Name the script that contains the command, or the tool's config.",
)

E1183 = Code(
    "E1183",
    "not valid shell syntax",
    cause="A quote, a bracket or a heredoc that starts at the place shown is not closed, or the file "
    "is not text.",
    cure="Close it. `bash -n SCRIPT` shows bash's own message.",
)

E1184 = Code(
    "E1184",
    "command with a custom script",
    cause="The command runs a training script that belongs to no tool. The meaning of its flags is "
    "defined in that script.",
    cure="Port the script itself. `--from trl` reads its flags as those of TRL's command line.",
)

E1185 = Code(
    "E1185",
    "config of a command not found",
    cause="The command names a config that is neither next to the script nor below the working "
    "folder, or whose name is known only at run time.",
    cure="Run `recipe port` in the folder where the script runs, or write the name out.",
)

W1186 = Code(
    "W1186",
    "part of a command is ignored",
    cause="A file of the launcher or of DeepSpeed that the command names does not exist, or a word of "
    "the command is not a flag. The rest is ported.",
    cure="Name the file on the command line, or give `--devices N`.",
)

E1187 = Code(
    "E1187",
    "path outside of the folders",
    cause="The command names a file outside of the script's folder and of the working folder. It is "
    "not opened.",
    cure="Copy the file next to the script, or name it on the command line.",
)


class _Script:
    def __init__(self, path: Path, file: str, text: str, beside: Sequence[Path]) -> None:
        self.path, self.file = path, file
        self.text = re.sub("[\ue000-\ue002]", "?", text)
        self.beside = [path for path in beside if path.suffix in CONFIGS]
        self.taken: set[Path] = set()
        self.found: list[Diagnostic] = []
        self.start = ""
        self.tree = Tree(_SECRET.sub(lambda match: match[1] + "*" * len(match[2]), self.text), file)
        self.starts = [0, *(match.end() for match in re.finditer(r"\r\n|[\n\r\x85\u2028\u2029]", self.text))]
        self.here = f"{Path.cwd()}/"
        place = "" if str(path) == "-" else os.path.abspath(path)
        names = dict.fromkeys(("0", "BASH_SOURCE"), place) if place else {}
        self.shell = Shell(self.text.replace("\r\n", " \n"), {**names})
        self.folder = Path() if str(path) == "-" else path.parent

    def span(self, at: int, end: int) -> Span:
        line = bisect_right(self.starts, at) - 1
        column = at - self.starts[line]
        text = self.tree.lines[line] if line < len(self.tree.lines) else ""
        return self.tree.span(line, column, max(1, min(end - at, len(text) - column)))

    def place(self, word: Word) -> Span:
        return self.span(word.at, word.end)

    def refused(self, code: Code, message: str, help: str, span: Span) -> Refused:
        return Refused(Diagnostic(code, message, help=help, span=span))

    def local(self, statement: Statement) -> Statement:
        """Return a statement whose paths below the current folder are relative to it."""
        words = (replace(word, text=word.text.replace(self.here, "")) for word in statement.words)
        return replace(statement, words=tuple(words))

    def command(self, number: int | None, chosen: str | None) -> Command:
        """Return the script's command.

        Raises:
            Refused: there is none, or none that can be ported.
        """
        program = self._chosen(number, chosen)
        self.start = program.statement.folder
        dialect = chosen or program.dialect
        if dialect not in dialects.KNOWN:
            raise self._unread(program)
        script = program.script if dialect == program.dialect else None
        script = "sft" if script == trl.SEEING else script
        if dialect == "trl" and script not in (None, *trl.SCRIPTS):
            message = f"`{program.name}` is TRL's {script}, which has no counterpart"
            help = f"recipes train like TRL's {listing(trl.SCRIPTS, 'and')}"
            raise self.refused(E1171, message, help, self.place(program.head))
        main, launched = self._main(program, dialect)
        sources, devices = [main], None
        launch = self._launch(program, launched)
        if launch is not None and "accelerate" in dialects.KNOWN[dialect].roles:
            sources.append(launch)
        elif launch is not None and isinstance(launch.data.get("num_processes"), int):
            devices = launch.data["num_processes"]
        sources += self._named(main, dialect)
        return Command(tuple(sources), dialect, script, devices, frozenset(self.taken))

    def _chosen(self, number: int | None, chosen: str | None) -> Program:
        if "\0" in self.text:
            at = self.text.index("\0")
            raise self.refused(
                E1183, "this is not a text file: it has a zero byte", "name the script", self.span(at, at)
            )
        try:
            self.shell.read()
        except Unreadable as error:
            help = "bash -n SCRIPT shows what bash cannot read"
            raise self.refused(E1183, str(error), help, self.span(error.at, error.at + 1)) from None
        programs = [
            program for statement in self.shell.statements if (program := _program(self.local(statement)))
        ]
        if chosen is None and any(
            program.tool for program in programs
        ):  # the others only have names like a training
            programs = [program for program in programs if program.tool or program.launcher]
        if not programs:
            message = f"{self.file} has no command that trains"
            help = "looked for the tools' commands, and launchers with a training script"
            raise self.refused(E1182, message, help, Span(self.file, 1, 1, self.tree.lines[0]))
        if (number is None and len(programs) > 1) or not 1 <= (number or 1) <= len(programs):
            lines = [
                f"--command {index}: {_called(program)} (line {self.place(program.head).line})"
                for index, program in enumerate(programs[:20], 1)
            ]
            message = f"{self.file} has {plural(len(programs), 'training command')}; a recipe is for one"
            help = "choose one:\n" + "\n".join(f"  {line}" for line in lines)
            raise self.refused(
                E1181, message, help, self.place(programs[-1 if len(programs) == 1 else 1].head)
            )
        return programs[(number or 1) - 1]

    def _unread(self, program: Program) -> Refused:
        read = listing([dialect.TITLE for dialect in dialects.every()])
        if program.tool:
            message = f"`{program.name}` is a command of {program.tool}, which recipec does not read yet"
            help = f"start a recipe by hand: recipe new my-run; recipec reads commands of {read}"
            return self.refused(E1193, message, help, self.place(program.head))
        message = f"`{shown(program.name)}` is your own script: only the script says what its flags mean"
        help = "port the script itself, or add --from trl if its flags are those of TRL's command line"
        if missing := unknown(program.name):
            message = (
                f"the name of the training script contains `{missing}`, which is known only when this "
                "script runs"
            )
            help = "write out the name of the script"
        return self.refused(E1184, message, help, self.place(program.head))

    def _main(self, program: Program, dialect: str) -> tuple[Source, list[Word]]:
        """Return the config with the command's flags, and the launcher's flags that stand among them."""
        words = list(program.arguments)
        launched = list(program.launcher)
        if dialect == "torchtune" and program.tool == "torchtune":
            end = _end_of_launcher(words, 0)
            launched, words = launched + words[:end], words[end + 1 :]
        flags, plain = _split(words, _types(dialect), dialect)
        over = [word for word in plain if word.text.startswith(OVER)] if dialect == "tunix" else []
        if over:
            plain = self._overriding(plain, over[0])
        named = [word for word in plain if word.text.endswith(CONFIGS)][:1]
        if not named and dialect in ("torchtune", "maxtext", "axolotl"):
            named = [word for word in plain if not _PAIR.match(word.text)][:1]
        if not named and dialect == "llamafactory":
            named = [word for word in plain if word.text.endswith(MARKS[1]) and not _PAIR.match(word.text)][
                :1
            ]
        named = [word for flag, values, _ in flags if flag in ("config", "c") for word in values] or named
        config = self._config(named[0], dialect) if named else None
        laid = _Laid.over(config)
        if dialect == "tunix" and not over:
            for section in REPLACED:
                if any(word.text.startswith(f"{section.partition('.')[0]}.") for word in plain):
                    laid.remove(section)
        if dialect == "litgpt":
            self._litgpt(laid, program, [word for word in plain if not word.text.endswith(CONFIGS)])
        for flag, values, span_word in flags:
            if flag not in ("config", "c"):
                self._lay(laid, flag, values, span_word, dialect)
        for word in plain:
            if _PAIR.match(word.text) and dialect in HYDRA:
                key, _, text = word.text.partition("=")
                self._lay(laid, key, [replace(word, text=text)], word, dialect)
            elif word.text.startswith("~") and dialect == "torchtune":
                laid.remove(word.text[1:])
            elif word not in named and dialect != "litgpt":
                message = f"recipec cannot use `{shown(word.text)}`: it is not a flag"
                self.found.append(Diagnostic(W1186, message, help="remove it", span=self.place(word)))
        if program.script == trl.SEEING:
            laid.lay(trl.SEEING, True, self.place(program.head))
            laid.lay("max_length", None, self.place(program.head))  # whatever its flag says
        path = Path("command.sh") if str(self.path) == "-" else self.path
        if config is not None and path.stem in ("run", "launch", "command"):
            path = config.path
        return laid.source(path, config.file if config else self.file), launched

    def _overriding(self, plain: Sequence[Word], over: Word) -> list[Word]:
        """Return Tunix's arguments; an overriding config file replaces base_config.yaml."""
        base = next((word for word in plain if word.text.endswith(CONFIGS) and word is not over), None)
        if base is not None and PurePosixPath(base.text).name not in OWN["tunix"]:
            message = f"two configs: {shown(base.text)}, and one that overrides it"
            raise self.refused(E1110, message, "merge them into one file", self.place(base))
        if base is not None and self._beside(base.text, self.place(base), W1186, says=False) is not None:
            message = f"recipec uses Tunix's own {shown(base.text)}, and ignores this copy"
            help = "move your changes into the file that overrides it"
            self.found.append(Diagnostic(W1186, message, help=help, span=self.place(base)))
        named = replace(over, text=over.text.removeprefix(OVER))
        return [named, *(word for word in plain if word not in (base, over))]

    def _lay(self, laid: _Laid, flag: str, values: Sequence[Word], place: Word, dialect: str) -> None:
        types, span = _types(dialect), self.place(place)
        key = flag if dialect in ("torchtune", "maxtext") else flag.replace("-", "_")
        if key not in types and key.startswith("no_") and not values and (not types or key[3:] in types):
            laid.lay(key[3:], False, span)
            return
        kind = types.get(key, "")
        read = [self._value(word, kind) for word in values]
        if not values:
            laid.lay(key, True, span)
        elif len(values) > 1 or ("list" in kind.lower() and dialect not in SINGLE):
            lists = len(read) == 1 and isinstance(read[0][0], list)
            many = read[0][0] if lists else [value for value, _ in read]
            secrets = {f"[{i}]": what for i, (_, texts) in enumerate(read) for what in texts.values()}
            laid.lay(key, many, span, secrets, self.place(values[0]))
        else:
            value, secrets = read[0]
            under = f"{key}._component_"
            old = laid.data.get(key) if dialect == "torchtune" else None
            key = under if isinstance(old, dict) and "_component_" in old and isinstance(value, str) else key
            key = _litgpt_key(key) if dialect == "litgpt" else key
            laid.lay(key, value, span, secrets, self.place(values[0]))
        for word in values:
            if missing := unknown(word.text):
                laid.shell[key] = missing

    def _value(self, word: Word, kind: str) -> tuple[Any, dict[str, str]]:
        """Parse a word as the tools do, and return the kinds of tokens in it."""
        text = shown(word.text)
        tree = Tree(text, self.file)
        if text[:1] in ("{", "[") and not unknown(word.text):
            try:
                return (parse_json if text[:1] == "{" else parse_yaml)(tree), tree.secrets
            except Refused:
                tree = Tree(text, self.file)
        if kind.replace(" | None", "").replace("None | ", "") != "str" and _VALUE.fullmatch(text):
            number = re.sub(r"^([-+]?\d+)([eE])", r"\1.0\2", text)
            number = re.sub(r"([eE])(\d)", r"\1+\2", number)
            return yaml.safe_load(number), {}
        return tree.value(text, ""), tree.secrets

    def _litgpt(self, laid: _Laid, program: Program, plain: Sequence[Word]) -> None:
        """Set what a litgpt command says besides its flags: the checkpoint, and that it trains LoRA."""
        method = plain[0].text if plain and plain[0].text in ("lora", "full", "adapter", "adapter_v2") else ""
        if method.startswith("adapter"):
            raise self._unread(replace(program, name=f"{program.name} {method}", tool="litgpt's adapters"))
        words = plain[1 if method else 0 :]
        if words:
            laid.lay("checkpoint_dir", shown(words[0].text), self.place(words[0]))
        full = "full" in f"{program.name} {method}"
        if not full and not any(str(key).startswith("lora_") for key in laid.data):
            rank = tools()["litgpt"]["sections"]["lora"]["lora_r"][1]
            laid.lay("lora_r", rank, self.place(program.head))

    def _config(self, word: Word, dialect: str) -> Source | None:
        """Read the config that a command names, or return None for one of OWN: the dialect knows its values.

        Raises:
            Refused: the config is missing, or its name is not known.
        """
        is_own = PurePosixPath(word.text).name in OWN.get(dialect, ())
        source = self._beside(word.text, self.place(word), W1186 if is_own else E1185, says=not is_own)
        if source is None and not is_own:
            raise Refused(self.found.pop())
        return source

    def _beside(self, name: str, span: Span, code: Code, says: bool = True) -> Source | None:
        """Find a file that a heredoc writes, or that is next to the script or below the working folder."""
        text = shown(name)
        if missing := unknown(name):
            message = f"the file's name contains `{missing}`, which is known only when the script runs"
            self.found.append(Diagnostic(code, message, help="write the name out", span=span))
            return None
        if (written := self.shell.written.get(name) or self.shell.written.get(self.here + name)) is not None:
            before = "\n" * (self.span(written.at, written.at).line - 1)
            tree = Tree(before + shown(written.text), self.file)
            data = (parse_json if text.endswith(".json") else parse_yaml)(tree)
            return Source(
                self.folder / text, f"{self.file}, {text}", data, tree.spans, tree.keys, tree.secrets
            )
        homes = [self.folder.resolve(), Path.cwd()]
        names = [text, f"recipes/configs/{text}.yaml"]  # the configs in torchtune's repository
        names = names if not text.endswith(CONFIGS) else [text]
        starts = dict.fromkeys([self.start, ""])
        places = [home / start / name for home in homes for start in starts for name in names]
        inside = [place for place in places if any(place.resolve().is_relative_to(home) for home in homes)]
        present = next((place for place in inside if place.is_file()), None)
        paths = [path for path in self.beside if path.name == PurePosixPath(text).name]
        if paths:
            present = paths[0]
            self.taken.add(present)
        elif not inside and says:
            message = f"`{text}` is outside the script's folder and the current folder"
            help = "copy it next to the script, or name it on the command line"
            raise Refused(Diagnostic(E1187, message, help=help, span=span))
        if present is not None:
            source, problems = read(present)
            if source is None:
                raise Refused(problems[-1])
            if not isinstance(source.data, dict):
                message = f"{source.file} is not a mapping of `key: value` lines, as a config must be"
                raise Refused(Diagnostic(E1101, message, help="name a config", span=source.top()))
            self.found += problems
            return source
        if says:
            message = f"the file `{text}` is neither next to the script nor below the current folder"
            help = "run the port in the folder where the script runs, or name the file on the command line"
            if "://" in text:
                message, help = (
                    f"recipec does not download `{text}`",
                    "download it, and name the file instead",
                )
            elif not text.endswith(CONFIGS):
                help = f"if it is torchtune's own: tune cp {text} config.yaml, and --config config.yaml"
            self.found.append(Diagnostic(code, message, help=help, span=span))
        return None

    def _launch(self, program: Program, words: Sequence[Word]) -> Source | None:
        """Merge the launcher's flags into accelerate's file, or return None without any launch settings."""
        watched = program.statement.watched
        flags, _ = _split(words, {**_types("accelerate"), **dict.fromkeys(BARE, "bool")}, "")
        named = next((values for flag, values, _ in flags if flag == "config_file" and values), None)
        file = self._beside(named[0].text, self.place(named[0]), W1186) if named else None
        laid = _Laid.over(file)
        span = self.place(program.head)
        nodes, per_node = 1, None
        for flag, values, place in flags:
            name = RENAMED.get(flag, flag)
            value = self._value(values[0], "")[0] if values else True
            if flag in PER_NODE:
                per_node = (value, self.place(place))
            elif name == "include" and (gpus := re.fullmatch(r"[^:@]+:(\d+(?:,\d+)*)", str(value))):
                per_node = (gpus[1].count(",") + 1, self.place(place))
            elif name in ("use_deepspeed", "use_fsdp", "multi_gpu"):
                kind = {"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "multi_gpu": "MULTI_GPU"}[name]
                if name != "multi_gpu" or not laid.data.get("distributed_type"):
                    laid.lay("distributed_type", kind, self.place(place))
            elif name.startswith(("fsdp_", "parallelism_config_")):
                laid.lay(
                    f"{'fsdp_config' if name[0] == 'f' else 'parallelism_config'}.{name}",
                    value,
                    self.place(place),
                )
            elif name.startswith(("zero", "offload_", "deepspeed_")) or name in _OF_DEEPSPEED:
                laid.lay(f"deepspeed_config.{name}", value, self.place(place))
            elif name != "config_file":
                laid.lay(name, value, self.place(place))
            if name == "num_machines" and isinstance(value, int):
                nodes = value
        if per_node is not None:
            count = per_node[0]
            laid.lay("num_processes", count * nodes if isinstance(count, int) else count, per_node[1])
        visible = watched.get("CUDA_VISIBLE_DEVICES", "")
        if "num_processes" not in laid.data and re.fullmatch(r"\d+(,\d+)*", visible):
            laid.lay("num_processes", visible.count(",") + 1, span)
        if not laid.data:
            return None
        if laid.data.get("distributed_type") in (None, "NO") and laid.data.get("num_processes", 1) != 1:
            laid.lay("distributed_type", "MULTI_GPU", span)
        if len(recognize.ROLES["accelerate"].marks.intersection(laid.data)) < recognize.LEAST_MARKS:
            laid.lay("compute_environment", "LOCAL_MACHINE", span)
            laid.lay("distributed_type", laid.data.get("distributed_type", "NO"), span)
        return laid.source(self.path, file.file if file else f"{self.file}, launcher")

    def _named(self, main: Source, dialect: str) -> Iterator[Source]:
        """Yield the files that the main file's keys name and that the tool reads."""
        roles = dialects.KNOWN[dialect].roles
        for key, role in (("deepspeed", "deepspeed"), ("accelerate_config", "accelerate")):
            value, span = main.get(key, None), main.span(key)
            if (
                role in roles
                and isinstance(value, str)
                and value.endswith(CONFIGS)
                and span
                and "$" not in value
            ):
                path = self._beside(value, span, W1186)
                yield from [path] if path else []
        if "dataset_info" in roles and isinstance(folder := main.get("dataset_dir", "data"), str):
            path = self._beside(f"{folder}/dataset_info.json", main.top(), W1186, says=False)
            yield from [path] if path else []


_OF_DEEPSPEED = ("gradient_accumulation_steps", "gradient_clipping")


def _litgpt_key(key: str) -> str:
    """Turn `data.json_path` of litgpt's command line into `data.init_args.json_path`, as in its files."""
    if key == "data":
        return "data.class_path"
    return (
        f"data.init_args.{key.removeprefix('data.')}"
        if re.match(r"data\.(?!class_path|init_args)", key)
        else key
    )


def _split(
    words: Sequence[Word], types: Mapping[str, str], dialect: str
) -> tuple[list[tuple[str, list[Word], Word]], list[Word]]:
    """Split a command's words into flags, each with its values and its word, and the other words."""
    flags: list[tuple[str, list[Word], Word]] = []
    plain: list[Word] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.text.startswith("-") or word.text in ("-", "--"):
            plain += [word] if word.text not in ("-", "--") else []
            continue
        name, equals, text = word.text.lstrip("-").partition("=")
        if word.text.startswith("--"):
            name = name.replace("-", "_") if dialect not in ("torchtune", "maxtext") else name
        if equals:
            flags.append((name, [replace(word, text=text)], word))
            continue
        values: list[Word] = []
        kind = types.get(name, "")
        many = dialect not in SINGLE and (not kind or "list" in kind.lower())
        switch = re.fullmatch(r"bool( \| None)?", kind)
        while at < len(words) and (many or not values) and not re.match(r"--|-[A-Za-z]", words[at].text):
            if dialect in HYDRA and _PAIR.match(words[at].text) and name != "config":
                break
            if switch and not re.fullmatch(r"(?i)true|false|yes|no|0|1|t|f|y|n|none", words[at].text):
                break
            values.append(words[at])
            at += 1
        flags.append((name, values, word))
    return flags, plain
