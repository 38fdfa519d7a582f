"""Follow the statements of a Python script and the values in them, without running anything.

A value that depends on something else (an input, the environment, a download) is Unknown. If the value of a
condition is unknown, both branches are followed, and a variable that differs between them becomes Unknown.
"""

from __future__ import annotations

import ast
import operator
import posixpath
import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from string import Formatter
from typing import Any, cast

from recipec.port import hf_argument_parser
from recipec.port.copies import Copier
from recipec.port.hf_argument_parser import Given
from recipec.port.keys import words
from recipec.port.meaning.scripts import WITHOUT, ByHand, Chat, Column, End, Text, before_hand, is_content
from recipec.port.read import ScriptText, conceal, unparsed
from recipec.port.script_values import (
    LONGEST,
    NOTHING,
    PLAIN,
    Arg,
    Function,
    Known,
    Made,
    Row,
    Unknown,
    above,
    columns_of,
    first_made,
    has_unknown,
    joined,
    relabeled,
    same,
    spoil,
    text_of,
)

MOST_STEPS, DEEPEST, LARGEST = 200_000, 24, 1023
"""The most expressions that are followed, nested calls, and bits of a number."""

TRAINERS = {
    **dict.fromkeys(("SFTTrainer", "UnslothTrainer"), "sft"),
    **{f"{name.upper()}Trainer": name for name in ("dpo", "orpo", "cpo", "kto", "grpo", "rloo", "gkd")},
    "Trainer": "sft",
}
"""The trainers with a counterpart here, and their objectives."""
SECOND = {**dict.fromkeys(("DPOTrainer", "KTOTrainer"), ("ref_model",)), "GKDTrainer": ("teacher_model",)}
"""The second model of trainers that take one after the trained model."""
OVERLONG = "get_soft_overlong_punishment"
ROW_BY_ROW = words(
    "function num_proc desc remove_columns load_from_cache_file keep_in_memory cache_file_name batch_size "
    "batched writer_batch_size"
)
"""Arguments of a data set's map and filter with which its function gets one row, and nothing else."""
STOPPING, STOPS = "EarlyStoppingCallback", ("early_stopping_patience", "early_stopping_threshold")
PATH = "pretrained_model_name_or_path"
UNSLOTHS = ("FastLanguageModel", "FastModel", "FastVisionModel")
UNSLOTH_COLLATOR, OF_COLLATOR = "UnslothVisionDataCollator", ("model", "processor", "tokenizer")
CONFIG = re.compile(r"(SFT|DPO|ORPO|KTO|GRPO|RLOO|CPO|GKD|Lora|BitsAndBytes)Config|\w*TrainingArguments")
DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "half": "float16", "float32": "float32"}
TRUE = ("is_bfloat16_supported", "is_bf16_supported", "is_torch_bf16_gpu_available", "is_available")


_OPERATORS = {
    **{"Add": "add", "Sub": "sub", "Mult": "mul", "Div": "truediv", "FloorDiv": "floordiv", "Mod": "mod"},
    **{"Pow": "pow", "BitOr": "or_", "Eq": "eq", "NotEq": "ne", "Lt": "lt", "LtE": "le", "Gt": "gt"},
    "GtE": "ge",
}
_ARITHMETIC: Mapping[type, Callable[[Any, Any], Any]] = {
    **{getattr(ast, node): getattr(operator, name) for node, name in _OPERATORS.items()},
    **{ast.Is: lambda a, b: a is b or a == b, ast.IsNot: lambda a, b: not (a is b or a == b)},
    **{ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b},
}
_CHANGES = words("append extend insert remove pop update setdefault clear sort reverse")
"""Methods that change a list or a dictionary in place."""
_LONG = (str, list, tuple, dict)
_BUILTINS: Mapping[str, Callable[..., Any]] = {
    **{"int": int, "float": float, "str": str, "bool": bool, "len": len, "min": min, "max": max},
    **{"round": round, "abs": abs, "list": list, "tuple": tuple, "sum": sum, "Path": str},
}
_METHODS = words(
    "format strip lstrip rstrip split replace upper lower join removeprefix removesuffix startswith endswith "
    "get keys values items copy"
)
_SAME = words("resolve absolute as_posix")
"""Methods of a path that name the same file."""
_READERS = {f"from_{reader}": reader for reader in ("json", "csv", "parquet")}
"""Methods of datasets.Dataset that read files as load_dataset does."""
_FRAMES = {f"read_{reader}": reader for reader in ("json", "csv", "parquet")}
"""Functions of pandas that read files as load_dataset does."""
_MODELS = words("prepare_model_for_kbit_training create_reference_model deepcopy")
"""Functions that return a model with the same weights."""
_TOKENIZER = words("padding_side truncation_side model_max_length add_eos_token add_bos_token chat_template")
"""Arguments of a tokenizer that change its tokens."""
_ALIKE = words(
    "streaming num_proc cache_dir keep_in_memory download_mode download_config verification_mode "
    "ignore_verifications save_infos features trust_remote_code token use_auth_token storage_options task"
)
"""Arguments of load_dataset that select no other rows, and columns by no other names."""
_DEFAULTS = (None, "utf-8", ",")
"""Values of its other arguments that change nothing."""
_BARE = re.compile(r"^the condition `\w+\.chat_template is None`")
"""Matches the condition that a tokenizer has no template."""
_PATHS: Mapping[str, Callable[..., str]] = {
    **{"join": posixpath.join, "dirname": above, "normpath": posixpath.normpath},
    **dict.fromkeys(("abspath", "realpath", "expanduser"), str),
}
"""Functions of os.path. A relative path stays relative: the recipe's paths are, too."""


@dataclass
class Follower:
    """Follows a script's statements.

    Attributes:
        trainers: the constructed trainers, each with its objective's class.
        others: constructed trainers without a counterpart here.
        every: all of them, in the order in which the script constructs them.
        unsure: why it is unknown whether, or how often, the current statement runs; "" if it is known.
        changed_within: what a function changes inside a column, which is not followed; "" for nothing.
        tokenizers: the tokenizers that from_pretrained loads.
        frozen: what the script assigns to requires_grad of some weights.
        file_arguments: the file of the arguments that the script parses; None if there is none.
        copier: copies functions of the script.
    """

    code: ScriptText
    file_arguments: Given | None = None
    copier: Copier | None = None
    trainers: list[Made] = field(default_factory=list)
    others: list[Made] = field(default_factory=list)
    every: list[Made] = field(default_factory=list)
    classes: list[tuple[str, str, Any]] = field(default_factory=list)
    unsure: str = ""
    changed_within: str = ""
    frozen: list[Arg] = field(default_factory=list)
    tokenizers: list[Made] = field(default_factory=list)
    steps: int = 0
    depth: int = 0

    def unknown(self, node: ast.AST, what: str = "") -> Unknown:
        text = what or f"`{self.code.shown(node)}`"
        return Unknown(f"{text} on line {self.code.span(node).line}" if hasattr(node, "lineno") else text)

    def block(self, body: list[ast.stmt], env: ChainMap[str, Any]) -> Any:
        """Follow statements, and return what they return, or NOTHING."""
        pending: Unknown | None = None
        for node in body:
            out = self.statement(node, env)
            if isinstance(out, tuple) and out[:1] == (NOTHING,):
                pending = pending or out[1]  # only one branch of a condition returns
            elif out is not NOTHING:
                return pending or out
        return (NOTHING, pending) if pending and self.depth else NOTHING

    def uncalled(self, module: ast.Module, env: ChainMap[str, Any]) -> None:
        """Follow the only function that constructs a trainer, if the script does not call it by itself."""
        inner = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
        runs = [node for node in inner if any(map(_constructs, _own(node)))]
        if len(runs) == 1:
            self.inline(runs[0], Function(runs[0], env), [], {})

    def statement(self, node: ast.stmt, env: ChainMap[str, Any]) -> Any:
        match node:
            case ast.Assign(targets, value):
                result = self.value(value, env)
                for target in targets:
                    self.bind(target, result, env, value)
            case ast.AnnAssign(target, _, ast.expr() as value):
                self.bind(target, self.value(value, env), env, value)
            case ast.AugAssign(target, op, value):
                joined = ast.copy_location(ast.BinOp(_loaded(target), op, value), node)
                self.bind(target, self.value(joined, env), env, value)
            case ast.Expr(value):
                self.value(value, env)
            case ast.Return(value):
                return self.value(value, env) if value else None
            case ast.If(test, body, orelse):
                known = self.value(test, env)
                if isinstance(known, PLAIN):
                    return self.block(body if known else orelse, env)
                return self.either(node, (body, orelse), env)
            case ast.For(_, _, body) if any(
                isinstance(statement, ast.Break | ast.Continue) for statement in ast.walk(node)
            ):
                return self.either(node, (body, []), env)
            case ast.For(target, iterable, body):
                for item in self.items(iterable, env):
                    self.bind(target, item, env, iterable)
                    if isinstance(item, Unknown):
                        return self.either(node, (body, []), env)
                    if (out := self.block(body, env)) is not NOTHING:
                        return out
            case ast.Match(_, cases):
                return self.either(node, (*(case.body for case in cases), []), env)
            case ast.Global(names) | ast.Nonlocal(names):
                for name, around in (
                    (name, variables) for name in names for variables in env.maps if name in variables
                ):
                    around[name] = self.unknown(node, f"`{name}`, which a function changes,")
            case ast.While(_, body):
                return self.either(node, (body, []), env)
            case ast.With(items, body):
                for item in items:
                    opened = self.value(item.context_expr, env)
                    if item.optional_vars is not None and isinstance(opened, Made) and opened.kind == "file":
                        self.bind(item.optional_vars, opened, env, item.context_expr)
                return self.block(body, env)
            case ast.Try(body, _, orelse, final):
                return self.block([*body, *orelse, *final], env)
            case ast.FunctionDef(name):
                env[name] = Function(node, env)
            case ast.ClassDef(name, bases):
                env[name] = Function(node, env)
                self.classes += [(name, unparsed(base).rpartition(".")[2], node) for base in bases]
            case ast.Import(names) | ast.ImportFrom(_, names):
                for variable in names:
                    module = str(getattr(node, "module", None) or "").partition(".")[0]
                    if variable.name in hf_argument_parser.HELPERS and module in hf_argument_parser.MODULES:
                        env[variable.asname or variable.name] = Known(f"{module}.{variable.name}")
                    elif variable.asname:
                        env[variable.asname] = Known(variable.name)
                    else:
                        env.maps[0].pop(variable.name, None)
        return NOTHING

    def either(self, node: Any, branches: tuple[list[ast.stmt], ...], env: ChainMap[str, Any]) -> Any:
        """Follow the branches of a statement if it is unknown which of them runs."""
        what = (
            f"the {type(node).__name__.lower()}"
            if not isinstance(node, ast.If)
            else f"the condition `{self.code.shown(node.test)}`"
        )
        unknown, before = self.unknown(node, what), dict(env.maps[0])
        held, self.unsure = self.unsure, unknown.why
        outs, after = [], []
        for body in branches:
            env.maps[0].clear()
            env.maps[0].update(before)
            outs.append(self.block(body, env))
            after.append(dict(env.maps[0]))
        self.unsure = held
        for name in {name for variables in after for name in variables}:
            values = [variables.get(name, NOTHING) for variables in after]
            alike = all(value is values[0] or same(value, values[0]) for value in values)
            env[name] = values[0] if alike else first_made(values) or unknown
        if all(out is NOTHING for out in outs):
            return NOTHING
        return (NOTHING, unknown) if any(out is NOTHING for out in outs) else unknown

    def bind(self, target: Any, value: Any, env: ChainMap[str, Any], node: ast.expr) -> None:
        """Assign a value to a name, an attribute or a key."""
        match target:
            case ast.Name(name):
                env[name] = value
            case ast.Tuple(targets) | ast.List(targets):
                values = value if isinstance(value, list | tuple) and len(value) == len(targets) else None
                for number, element in enumerate(targets):
                    self.bind(element, values[number] if values else self.unknown(node), env, node)
            case ast.Attribute(owner, name):
                where = self.value(owner, env)
                if name == "requires_grad":
                    self.frozen.append(Arg(value, node, target))
                elif isinstance(where, Made) and where.kind == "frame":
                    where.told["changed"] = Arg(True, node, target)
                elif isinstance(where, Made):
                    where.args[name] = Arg(Unknown(self.unsure) if self.unsure else value, node, target)
            case ast.Subscript(owner, index):
                where, key = self.value(owner, env), self.value(index, env)
                value = Unknown(self.unsure) if self.unsure else value
                if isinstance(where, Row) and isinstance(key, str):
                    where.columns[key] = value
                elif isinstance(where, Made) and where.kind == "frame":
                    where.told["changed"] = Arg(True, node, target)
                elif isinstance(where, dict) and isinstance(key, str | int):
                    where[key] = value
                elif isinstance(where, list | dict):
                    spoil(where, self.unknown(target))
                elif isinstance(where, Column | Row) or relabeled(where, value):
                    self.changed_within = self.unknown(target).why

    def items(self, node: ast.expr, env: ChainMap[str, Any]) -> list[Any]:
        """Return what a loop iterates over: constants, a row's columns taken together, or one Unknown."""
        value = self.value(node, env)
        if isinstance(value, Column):
            return [value]
        if isinstance(value, dict):
            value = list(value)
        if isinstance(value, list | tuple) and len(value) <= 64:
            return list(value)
        return [self.unknown(node)]

    def value(self, node: ast.expr, env: ChainMap[str, Any]) -> Any:
        """Return an expression's value."""
        self.steps += 1
        if self.steps > MOST_STEPS:
            return Unknown("the script is too long to follow")
        try:
            return self.expression(node, env)
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError):
            return self.unknown(node)

    def expression(self, node: ast.expr, env: ChainMap[str, Any]) -> Any:
        match node:
            case ast.Constant(value):
                return value
            case ast.Name(name):
                namespace = {"__name__": "__main__", "__file__": self.code.tree.file}
                return env[name] if name in env else namespace.get(name) or Known(name)
            case ast.List(items) | ast.Set(items):  # PEFT takes its target_modules as either
                return self.several(items, env)
            case ast.Tuple(items):
                return tuple(self.several(items, env))
            case ast.Dict(names, values):
                mapping: dict[Any, Any] = {}
                for key, item in zip(names, values, strict=True):
                    spread = self.value(item, env)
                    mapping.update(spread if key is None else {self.value(key, env): spread})
                return mapping
            case ast.JoinedStr(parts):
                return text_of([self.value(part, env) for part in parts]) or self.unknown(node)
            case ast.FormattedValue(value, conversion, spec):
                mapping = self.value(value, env)
                plain = spec is None and conversion == -1 and isinstance(mapping, str | int | float)
                return str(mapping) if plain else mapping if spec is None else self.unknown(node)
            case ast.BinOp(left, op, right) | ast.Compare(left, [op], [right]):
                return self.arithmetic(node, op, self.value(left, env), self.value(right, env))
            case ast.UnaryOp(op, operand):
                operand_value = self.value(operand, env)
                if isinstance(op, ast.Not) and isinstance(operand_value, PLAIN):
                    return not operand_value
                if isinstance(operand_value, int | float) and isinstance(op, ast.USub | ast.UAdd):
                    return -operand_value if isinstance(op, ast.USub) else +operand_value
            case ast.BoolOp(op, values):
                for item in values:
                    item_value = self.value(item, env)
                    if not isinstance(item_value, PLAIN):
                        return self.unknown(node)
                    if bool(item_value) is isinstance(op, ast.Or):
                        break
                return item_value
            case ast.IfExp(test, body, orelse):
                known = self.value(test, env)
                if isinstance(known, PLAIN):
                    return self.value(body if known else orelse, env)
                return self.unknown(test, f"the condition `{self.code.shown(test)}`")
            case ast.Subscript(owner, index):
                return self.part(node, self.value(owner, env), self.value(index, env))
            case ast.Attribute(owner, name):
                return self.attribute(node, self.value(owner, env), name)
            case ast.ListComp(element, [comprehension]) if self.lines(element, comprehension):
                file = self.value(comprehension.iter, env)
                return self.of_file(node, file) if isinstance(file, Made) else self.unknown(node)
            case ast.ListComp(element, [ast.comprehension(ast.Name() as target, iterable, [])]) if isinstance(
                rows := self.value(iterable, env), Made
            ) and rows.kind in ("data", "held"):
                return self.listed(node, rows, target, element, env)
            case ast.ListComp(element, [ast.comprehension(target, iterable, [])]):
                inner, made_list = env.new_child(), []
                for item in self.items(iterable, env):
                    self.bind(target, item, inner, iterable)
                    made_list.append(self.value(element, inner))
                return made_list if not any(isinstance(item, Unknown) for item in made_list) else made_list[0]
            case ast.Lambda():
                return Function(node, env)
            case ast.NamedExpr(target, value):
                item_value = self.value(value, env)
                self.bind(target, item_value, env, value)
                return item_value
            case ast.Call():
                return self.call(node, env)
        return self.unknown(node)

    def listed(
        self, node: ast.expr, rows: Made, target: ast.Name, element: ast.expr, env: ChainMap[str, Any]
    ) -> Made:
        """Return the data set whose rows a comprehension makes of another one's."""
        function: Any = None
        if isinstance(element, ast.Call) and unparsed(element) == f"{unparsed(element.func)}({target.id})":
            function = self.value(element.func, env)
        if not isinstance(function, Function):
            accepted = ast.arguments([], [ast.arg(target.id)], None, [], [], None, [])
            function = Function(ast.copy_location(ast.Lambda(accepted, element), node), env)
        key = Arg(getattr(function.node, "name", "lambda"), node, node)
        changed = rows.but(told={**rows.told, "function": key})
        return self.over(node, changed, function, "map", {})

    def lines(self, element: ast.expr, over: ast.comprehension) -> bool:
        """Return whether a comprehension parses each line of a file as JSON. It may leave out blank lines."""
        name = unparsed(over.target)
        every = all(unparsed(condition) in (name, f"{name}.strip()") for condition in over.ifs)
        return every and unparsed(element) in (f"json.loads({name})", f"json.loads({name}.strip())")

    def several(self, nodes: list[ast.expr], env: ChainMap[str, Any]) -> list[Any]:
        out: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                out += self.value(node.value, env)
            else:
                out.append(self.value(node, env))
        return out

    def arithmetic(self, node: ast.expr, op: Any, left: Any, right: Any) -> Any:
        if unknown := next((operand for operand in (left, right) if isinstance(operand, Unknown)), None):
            return unknown
        if isinstance(op, ast.Div) and isinstance(left, str) and isinstance(right, str):
            return posixpath.join(left, right)  # of paths
        if isinstance(op, ast.Add) and not (isinstance(left, PLAIN) and isinstance(right, PLAIN)):
            return text_of([left, right]) or self.unknown(node)
        if isinstance(op, ast.Is | ast.IsNot) and right is None and isinstance(left, Made | Function):
            return isinstance(op, ast.IsNot)
        if not isinstance(left, PLAIN) or not isinstance(right, PLAIN):
            return self.unknown(node)
        sizes = [
            len(operand) if isinstance(operand, _LONG) else abs(operand or 0) for operand in (left, right)
        ]
        if isinstance(left, _LONG) or isinstance(right, _LONG):
            together = sizes[0] * sizes[1] if isinstance(op, ast.Mult) else sum(sizes)
            if together > LONGEST or isinstance(op, ast.Mod):
                return self.unknown(node)
        elif isinstance(op, ast.Pow) and (sizes[0] > MOST_STEPS or sizes[1] > 64):
            return self.unknown(node)
        result = _ARITHMETIC[type(op)](left, right)
        return self.unknown(node) if isinstance(result, int) and result.bit_length() > LARGEST else result

    def part(self, node: ast.expr, owner: Any, index: Any) -> Any:
        if isinstance(owner, Unknown):
            return owner
        if isinstance(owner, Row) and isinstance(index, str):
            return owner.columns.get(index, Column(index))
        if isinstance(owner, Made) and owner.kind == "tokens":
            return owner.but(kind="ids")
        if isinstance(owner, Made) and owner.kind == "parts":
            return owner.args[index].value
        if isinstance(owner, Made) and owner.kind == "frame" and isinstance(index, list):
            return (
                owner.but(told=dict(owner.told))
                if all(isinstance(item, str) for item in index)
                else self.unknown(node)
            )
        if isinstance(owner, Made) and owner.kind == "all" and isinstance(index, str):
            return owner.but(kind="data", args={**owner.args, "split": Arg(index, node, node)})
        if isinstance(owner, str | list | tuple | dict) and isinstance(index, str | int):
            value: Any = owner
            return value[index]
        return self.unknown(node)

    def attribute(self, node: ast.expr, owner: Any, name: str) -> Any:
        if isinstance(owner, Unknown):
            return owner
        if isinstance(owner, Known):
            last = owner.name.rpartition(".")[2]
            return DTYPES[name] if last == "torch" and name in DTYPES else Known(f"{owner.name}.{name}")
        if isinstance(owner, str) and name == "parent":
            return above(owner)
        if isinstance(owner, Made):
            if owner.kind == "tokenizer" and name == "eos_token":
                return End()
            if name in owner.args:
                if self.file_arguments:
                    self.file_arguments.read(name, owner.args[name])
                return owner.args[name].value
            if "parsed" in owner.told and owner.kind in hf_argument_parser.SECTIONS:
                return hf_argument_parser.default(owner, name)
            if name == "config" and owner.kind in ("model", "unsloth"):
                return owner.told.setdefault(name, Arg(Made(name, {}, node), node, node)).value
        return self.unknown(node)

    def call(self, node: ast.Call, env: ChainMap[str, Any]) -> Any:
        """Return a call's value: a call of the script's functions or of a known one, or Unknown."""
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value, env)
            if not isinstance(owner, Known):
                return self.method(node, owner, node.func.attr, env)
            callee: Any = Known(f"{owner.name}.{node.func.attr}")
        else:
            callee = self.value(node.func, env)
        if isinstance(callee, Function):
            return self.inline(node, callee, self.several(node.args, env), self.keywords(node, env))
        if isinstance(callee, Made) and callee.kind == "tokenizer":
            return self.tokens(node, env)
        if not isinstance(callee, Known):
            return self.unknown(node)
        return self.known(node, callee.name, env)

    def keywords(self, node: ast.Call, env: ChainMap[str, Any]) -> dict[str, Arg]:
        """Return the keyword arguments, including those in **."""
        out: dict[str, Arg] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value, env)
            if keyword.arg is not None:
                out[keyword.arg] = self.parsed(keyword.value, env) or Arg(value, keyword.value, keyword)
            elif isinstance(value, dict):
                out |= {str(name): Arg(item, keyword.value, keyword.value) for name, item in value.items()}
            elif isinstance(value, Made):
                out |= value.args
            else:
                out["**"] = Arg(self.unknown(keyword.value), keyword.value, keyword.value)
        return out

    def parsed(self, node: ast.expr, env: ChainMap[str, Any]) -> Arg | None:
        """Return the argument that an expression reads from a file, with its place there."""
        if self.file_arguments and isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = env.get(node.value.id)
            arg = owner.args.get(node.attr) if isinstance(owner, Made) else None
            return arg if arg is not None and arg is self.file_arguments.args.get(node.attr) else None
        return None

    def inline(self, node: ast.AST, callee: Function, values: list[Any], named: dict[str, Arg]) -> Any:
        """Return the value of a function of the script, or an object of a class. Default arguments apply."""
        body = callee.node
        if isinstance(body, ast.ClassDef):
            instance = Made("object", {}, node)
            base = next((base for _, base, node in self.classes if node is body), "")
            changes = any(isinstance(statement, ast.FunctionDef) for statement in body.body)
            if base.endswith("Trainer") or (CONFIG.fullmatch(base) and changes):
                instance = Made(f"class {body.name}", dict(named), body)
                if base.endswith("Trainer"):
                    self.constructed(instance, self.others)
                return instance
            if CONFIG.fullmatch(base) or base in hf_argument_parser.SECTIONS:
                fields = {
                    unparsed(statement.target)
                    for statement in body.body
                    if isinstance(statement, ast.AnnAssign)
                }
                instance = Made(
                    base,
                    {},
                    node,
                    told={"own": Arg(fields - hf_argument_parser.of_class(base), ast.Constant(base), body)},
                )
            for statement in body.body:
                if (
                    isinstance(statement, ast.AnnAssign)
                    and statement.value
                    and isinstance(statement.target, ast.Name)
                ):
                    value = self.value(statement.value, callee.around)
                    instance.args[statement.target.id] = Arg(value, statement.value, statement.target)
            instance.args |= named
            return instance
        if self.depth >= DEEPEST:
            return self.unknown(node)
        env = callee.around.new_child()
        accepted = body.args
        names = [parameter.arg for parameter in (*accepted.posonlyargs, *accepted.args)]
        for name, default in [
            *zip(reversed(names), reversed(accepted.defaults), strict=False),
            *(
                (parameter.arg, d)
                for parameter, d in zip(accepted.kwonlyargs, accepted.kw_defaults, strict=True)
                if d
            ),
        ]:
            env[name] = self.value(default, callee.around)
        env.update(zip(names, values, strict=False))
        env.update({name: argument.value for name, argument in named.items()})
        for name in names:
            if name not in env.maps[0]:
                env[name] = self.unknown(
                    body, f"`{name}`, which {getattr(body, 'name', 'the function')} is given,"
                )
        self.depth += 1
        held, self.unsure = self.unsure, self.unsure
        out = self.value(body.body, env) if isinstance(body, ast.Lambda) else self.block(body.body, env)
        self.depth, self.unsure = self.depth - 1, held
        if isinstance(out, tuple) and out[:1] == (NOTHING,):
            return out[1]
        return None if out is NOTHING else out

    def keep(self, trainer: Made) -> None:
        """Keep a trainer's arguments as they are. What the script changes later is for another trainer."""
        for key, arg in trainer.args.items():
            if isinstance(arg.value, Made):
                trainer.args[key] = replace(arg, value=arg.value.but(told=dict(arg.value.told)))

    def constructed(self, instance: Made, kind: list[Made]) -> Made:
        """Note a trainer, and what it shares with the trainers before it."""
        model = instance.args["model"].value if "model" in instance.args else None
        for earlier in self.every:
            other = earlier.args["model"].value if "model" in earlier.args else None
            if isinstance(model, Made) and isinstance(other, Made) and model.origin is other.origin:
                instance.told["after"] = Arg(earlier, instance.args["model"].node, instance.args["model"].key)
            self.keep(earlier)
        self.every.append(instance)
        kind.append(instance)
        return instance

    def known(self, node: ast.Call, name: str, env: ChainMap[str, Any]) -> Any:
        """Return the value of a call to a library."""
        owner, _, last = name.rpartition(".")
        cls = owner.rpartition(".")[2]
        args, named = self.several(node.args, env), self.keywords(node, env)
        at = [
            self.parsed(expr, env) or Arg(value, expr, expr)
            for value, expr in zip(args, node.args, strict=False)
        ]
        if last == "from_pretrained":
            return self.pretrained(node, cls, at, named)
        if last == "get_peft_model":
            model = args[0] if args else named.pop("model", Arg(None, node, node)).value
            if not isinstance(model, Made):
                return self.unknown(node)
            config = at[1] if len(at) > 1 else named.get("peft_config")
            lora = Made("lora", named, node) if cls in UNSLOTHS else config.value if config else None
            return model.but(told={**model.told, "lora": Arg(lora, config.node if config else node, node)})
        if last.endswith("Trainer") and not last.startswith("Patch"):
            second = SECOND.get(last, ())
            names = ("model", *second, "args", "data_collator", "train_dataset", "eval_dataset")
            if last in ("GRPOTrainer", "RLOOTrainer"):
                names = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")
            for key, argument in zip(names, at, strict=False):
                named.setdefault(key, argument)
            looped = self.unsure.startswith(("the for", "the while"))
            instance = Made(last, named, node, told={"unsure": at[0]} if looped else {})
            return self.constructed(instance, self.trainers if last in TRAINERS else self.others)
        if CONFIG.fullmatch(last):
            kind = {"LoraConfig": "lora", "BitsAndBytesConfig": "bnb"}.get(last, last)
            return Made(kind, named if kind == last or not at else {"r": at[0], **named}, node)
        if last in ("standardize_sharegpt", "standardize_data_formats") and args:
            item, here = args[0], Arg(True, node, node.func)
            return (
                item.but(told={**item.told, "standardize_sharegpt": here}) if isinstance(item, Made) else item
            )
        if last == "get_chat_template":
            named |= {"chat_template": at[1]} if len(at) > 1 else {}
            before = args[0].args if args and isinstance(args[0], Made) else {}
            return Made(
                "tokenizer", {**before, **{k: v for k, v in named.items() if k == "chat_template"}}, node
            )
        if last in ("setup_chat_format", "clone_chat_template"):
            both = [*args[:2], *(named[key].value for key in ("model", "tokenizer") if key in named)]
            if len(both) != 2 or not isinstance(both[1], Made):
                return self.unknown(node)
            bare = _BARE.search(self.unsure)
            sure: Any = WITHOUT if bare else Unknown(self.unsure) if self.unsure else True
            both[1].args[last] = Arg(sure, node, node.func)
            return (*both, []) if last == "clone_chat_template" else tuple(both)
        if last == "train_on_responses_only" and args and isinstance(args[0], Made):
            args[0].told["assistant_only_loss"] = Arg(True, node, node.func)
            part = at[2] if len(at) > 2 else named.get("response_part")
            if part and re.search(r"<\|channel\|>final|</think>", str(part.value)):
                args[0].told["response_part"] = part
            return args[0]
        if last in _MODELS and args and isinstance(args[0], Made):
            return args[0]
        if last == "load_dataset":
            return self.data(node, at, named)
        if cls.endswith("Dataset") and last in _READERS:
            files = at[0] if at else named.pop("path_or_paths", None)
            of_files = {"path": Arg(_READERS[last], node, node.func), "split": Arg("train", node, node)}
            if not files:
                return self.unknown(node)
            return self.data(node, [], {**of_files, "data_files": files, **named})
        if owner in ("pd", "pandas") and last in _FRAMES:
            return self.frame(node, last, at, named)
        if cls.endswith("Dataset") and last in ("from_pandas", "from_list"):
            frame = args[0] if args else next((argument.value for argument in named.values()), None)
            kept = set(named) <= {"df", "mapping", "preserve_index", "split"}
            ready = isinstance(frame, Made) and frame.kind == "frame" and "changed" not in frame.told and kept
            return frame.but(kind="data") if ready and isinstance(frame, Made) else self.unknown(node)
        if name == "open" and at and isinstance(args[0], str):
            return Made("file", {"path": at[0]}, node)
        if name in ("json.load", "json.loads") and args and isinstance(args[0], Made):
            return self.of_file(node, args[0])
        if last == "ArgumentParser" or hf_argument_parser.PARSERS.fullmatch(last):
            kind = "parser" if last == "ArgumentParser" else "cli"
            classes = args[:1] or [argument.value for argument in named.values()][:1]
            return Made(kind, {"classes": Arg(classes, node, node)}, node)
        if owner in hf_argument_parser.MODULES and last in hf_argument_parser.HELPERS and self.file_arguments:
            return self.helped(node, last, args)
        if last in ("get_peft_config", "get_quantization_config") and args and isinstance(args[0], Made):
            return (
                hf_argument_parser.of_model(args[0], node, last, self.file_arguments)
                if self.file_arguments
                else self.unknown(node)
            )
        if last in ("Fire", "run") and args and isinstance(args[0], Function):
            return self.inline(node, args[0], [], {})
        if last in TRUE:
            return True
        if name == "setattr" and isinstance(args[0], Made) and isinstance(args[1], str):
            args[0].args[args[1]] = replace(at[2], value=Unknown(self.unsure) if self.unsure else args[2])
            return None
        if name == "getattr" and len(args) == 2 and isinstance(args[1], str):
            return self.attribute(node, args[0], args[1])
        if last == OVERLONG:
            named |= dict(zip(("max_completion_len", "soft_punish_cache"), at, strict=False))
            return Made("penalty", named, node)
        if last == UNSLOTH_COLLATOR:
            return Made(last, {key: arg for key, arg in named.items() if key not in OF_COLLATOR}, node)
        if last == STOPPING or last.startswith("DataCollator"):
            return Made(last, {**dict(zip(STOPS, at, strict=False)), **named}, node)
        if name in ("cast", "typing.cast", "t.cast") and len(args) == 2:
            return args[1]
        if last == "dict":
            return {key: argument.value for key, argument in named.items()}
        if last in ("field", "Field") and "default" in named:
            return named["default"].value
        if last == "zip":
            columns = all(isinstance(argument, Column) for argument in args)
            return [tuple(args)] if columns else [tuple(argument) for argument in zip(*args, strict=False)]
        if last == "concatenate_datasets" and args and isinstance(args[0], list):
            return joined(args[0]) or self.unknown(node)
        if unknown := next((argument for argument in args if isinstance(argument, Unknown)), None):
            return unknown
        plain = all(isinstance(argument, PLAIN) for argument in args) and not named
        if name.endswith(("getenv", "environ.get")) and len(at) == 2:
            return args[1]
        if plain and owner.endswith("path") and last in _PATHS:
            return _PATHS[last](*args)
        if plain and last in _BUILTINS and (not owner or last == "Path"):
            return _BUILTINS[last](*args)
        return self.unknown(node)

    def helped(self, node: ast.Call, name: str, args: list[Any]) -> Any:
        """Return what a helper of alignment-handbook or open-r1 makes of the parsed arguments."""
        if not args or not isinstance(args[0], Made) or "parsed" not in args[0].told:
            return self.unknown(node)
        defaults, more = args[0].args, args[1].args if len(args) > 1 and isinstance(args[1], Made) else {}
        for key, arg in defaults.items():
            if self.file_arguments and (name != "get_dataset" or key.startswith("dataset_")):
                self.file_arguments.read(key, arg)
        if name == "get_dataset" and "dataset_mixture" in defaults:
            return Made("all", {"dataset_mixture": defaults["dataset_mixture"]}, node)
        if name == "get_dataset":
            named = {"path": defaults.get("dataset_name"), "name": defaults.get("dataset_config")}
            return self.data(node, [], {key: arg for key, arg in named.items() if arg is not None})
        path = [defaults["model_name_or_path"]] if "model_name_or_path" in defaults else []
        if name == "get_tokenizer":
            taken = {"chat_template": more["chat_template"]} if "chat_template" in more else {}
            return self.pretrained(node, "AutoTokenizer", path, taken)
        names = {"model_revision": "revision", "dtype": "dtype", "torch_dtype": "torch_dtype"}
        names |= {"attn_implementation": "attn_implementation"}
        usual = Arg(hf_argument_parser.default(args[0], "dtype"), node, node)
        loaded = {new: defaults[old] for old, new in names.items() if old in defaults}
        loaded |= {} if {"dtype", "torch_dtype"}.intersection(loaded) else {"dtype": usual}
        if self.file_arguments and (
            instance := hf_argument_parser.of_model(
                args[0], node, "get_quantization_config", self.file_arguments
            )
        ):
            loaded["quantization_config"] = Arg(instance, node, node)
        return self.pretrained(node, "AutoModelForCausalLM", path, loaded)

    def pretrained(self, node: ast.Call, cls: str, at: list[Arg], named: dict[str, Arg]) -> Any:
        if "Tokenizer" in cls or "Processor" in cls:
            name = at[0] if at else named.get(PATH)
            tokenizer = {"tokenizer": name} if name else {}
            tokenizer |= {key: value for key, value in named.items() if key in _TOKENIZER}
            self.tokenizers.append(Made("tokenizer", tokenizer, node))
            return self.tokenizers[-1]
        first = "model_name" if cls in UNSLOTHS else PATH
        named = {**({first: at[0]} if at else {}), **named}
        language = re.fullmatch(
            r"Auto\w*ForCausalLM|\w+ForCausalLM|AutoModelForImageTextToText|\w+ForConditionalGeneration", cls
        )
        kind = "unsloth" if cls in UNSLOTHS else "model" if language and "Peft" not in cls else f"class {cls}"
        instance = Made(kind, named, node)
        return (instance, Made("tokenizer", {}, node)) if cls.startswith("Fast") else instance

    def data(self, node: ast.Call, at: list[Arg], named: dict[str, Arg]) -> Any:
        """Return a data set, or a dictionary of data sets by split if no split is named."""
        keys = ("path", "name", "split", "data_files", "data_dir", "revision")
        passed = {
            key: argument
            for key, argument in zip(("path", "name", "data_dir", "data_files"), at, strict=False)
        }
        passed |= {key: argument for key, argument in named.items() if key in keys}
        others = {key: argument for key, argument in named.items() if key not in (*keys, *_ALIKE)}
        if other := next((key for key, argument in others.items() if argument.value not in _DEFAULTS), None):
            return self.unknown(others[other].node, f"`{other}` of `{self.code.shown(node.func)}`")
        files = passed.get("data_files")
        if files and isinstance(files.value, dict):
            split = passed["split"].value if "split" in passed else "train"
            passed["data_files"] = replace(files, value=files.value.get(split, self.unknown(files.node)))
        statements = {"dataset_streaming": named["streaming"]} if "streaming" in named else {}
        return Made("data" if "split" in passed else "all", passed, node, told=statements)

    def frame(self, node: ast.Call, reader: str, at: list[Arg], named: dict[str, Arg]) -> Any:
        """Return a table that pandas reads from a file, if it reads all of the file's rows and columns."""
        path = at[0] if at else named.get("path_or_buf") or named.get("filepath_or_buffer")
        usual = {"lines": (True, False), "orient": ("records", None), "encoding": ("utf-8", "utf8", None)}
        usual |= {"sep": (",",), "engine": ("pyarrow", "python", "c", None), "dtype": (str, None)}
        others = [key for key, arg in named.items() if key in usual and arg.value not in usual[key]]
        others += [key for key in named if key not in (*usual, "path_or_buf", "filepath_or_buffer", "path")]
        path = path or named.get("path")
        if path is None or others or len(at) > 1:
            return self.unknown(node)
        taken = {"path": Arg(_FRAMES[reader], node, node.func), "data_files": path}
        return Made("frame", {**taken, "split": Arg("train", node, node)}, node)

    def of_file(self, node: ast.expr, file: Made) -> Any:
        """Return the rows of a JSON file that the script opens."""
        if file.kind != "file":
            return self.unknown(node)
        taken = {"path": Arg("json", node, node), "data_files": file.args["path"]}
        return Made("frame", {**taken, "split": Arg("train", node, node)}, node)

    def tokens(self, node: ast.Call, env: ChainMap[str, Any]) -> Any:
        """Return the result of tokenizing a text: the text, and the length at which it is cut off."""
        texts = self.several(node.args[:1], env)
        named = self.keywords(node, env)
        value = texts[0] if texts else named.get("text", Arg(None, node, node)).value
        text = Text.of([value]) if not isinstance(value, list) else None
        statements = {"max_length": named["max_length"]} if "max_length" in named else {}
        if text and not (text.pieces and isinstance(text.pieces[-1], End)):
            statements["add_special_tokens"] = Arg(True, node, node.func)
        return Made("tokens", {}, node, {"text": text}, told=statements) if text else self.unknown(node)

    def method(self, node: ast.Call, owner: Any, name: str, env: ChainMap[str, Any]) -> Any:
        args, named = self.several(node.args, env), self.keywords(node, env)
        if name == "requires_grad_":
            self.frozen.append(Arg(args[0] if args else True, node, node.func))
            return owner
        if isinstance(owner, Unknown):
            return owner
        if isinstance(owner, Column) and name in ("pop", "update", "append", "extend", "insert", "remove"):
            self.changed_within = self.unknown(node).why
        if isinstance(owner, list | dict) and name in _CHANGES:
            if self.unsure or named or any(isinstance(argument, Unknown) for argument in args):
                return spoil(owner, Unknown(self.unsure) if self.unsure else self.unknown(node))
            return getattr(owner, name)(*args)
        if isinstance(owner, str) and name in _SAME and not args:
            return owner
        if isinstance(owner, str) and name == "format":
            return self.formatted(node, owner, args, named)
        if isinstance(owner, Row) and name == "get" and args:
            return self.part(node, owner, args[0])
        if isinstance(owner, str | dict | list) and name in _METHODS and not named:
            if (
                len(owner) * (1 + sum(len(argument) for argument in args if isinstance(argument, _LONG)))
                > 10 * LONGEST
            ):
                return self.unknown(node)
            result = getattr(owner, name)(*args)
            return list(result) if name in ("keys", "values", "items") else result
        if isinstance(owner, Chat) and name == "removeprefix":
            return owner  # the template's bos_token, which the tokenizer would otherwise write twice
        if isinstance(owner, Made) and owner.kind == "ids" and name in ("copy", "append"):
            if name == "append":
                owner.told.pop("add_special_tokens", None)
            return owner  # labels, and the eos_token, which a run writes anyway
        if isinstance(owner, Made) and name == "add_callback" and args:
            before = owner.args["callbacks"].value if "callbacks" in owner.args else []
            owner.args["callbacks"] = Arg([*(before if isinstance(before, list) else []), *args], node, node)
            return owner
        if isinstance(owner, Made) and name == "resize_token_embeddings":
            owner.args[name] = Arg(True, node, node.func)
            return owner
        if not isinstance(owner, Made):
            return self.unknown(node)
        if owner.kind == "tokenizer" and name in ("add_tokens", "add_special_tokens"):
            return self.add_tokens(node, owner, args[0] if args else None)
        if owner.kind == "tokenizer" and name == "apply_chat_template" and (args or "conversation" in named):
            messages = args[0] if args else named["conversation"].value
            prompt = named.get("add_generation_prompt")
            kept = isinstance(messages, Column | list) and not (prompt and prompt.value)
            return Chat(messages) if kept and not has_unknown(messages) else self.unknown(node)
        if owner.kind == "parts":
            parts = {k: self.changed(node, part.value, name, args, named) for k, part in owner.args.items()}
            return owner.but(args={k: Arg(value, node, node) for k, value in parts.items()})
        if owner.kind in ("data", "all", "held"):
            return self.changed(node, owner, name, args, named)
        if owner.kind == "frame":
            changes = "inplace" in named and bool(named["inplace"].value)
            if changes or name in _CHANGES:
                owner.told["changed"] = Arg(True, node, node.func)
            kept = name in ("copy", "reset_index", "to_dict") and not changes
            return owner.but(told=dict(owner.told)) if kept else self.unknown(node)
        if owner.kind == "parser" and name == "add_argument" and args:
            flag = next((flag for flag in args if str(flag).startswith("--")), args[0])
            default = named.get("default") or Arg(False if "action" in named else None, node, node)
            owner.args[str(flag).lstrip("-").replace("-", "_")] = default
            return None
        if owner.kind == "parser" and name.startswith("parse_"):
            result = owner.but(kind="object")
            return (result, []) if "known" in name else result
        if owner.kind == "cli" and name.startswith("parse_"):
            classes = owner.args["classes"].value
            classes = classes[0] if classes and isinstance(classes[0], list | tuple) else classes
            if "parsed" not in owner.told:  # both branches of a condition may parse them
                result = tuple(self.arguments(node, cls) for cls in classes)
                owner.told["parsed"] = Arg(result, node, node)
            parsed = owner.told["parsed"].value
            if "return_remaining_strings" in named and named["return_remaining_strings"].value:
                parsed = (*parsed, [])
            return parsed[0] if name == "parse" and len(parsed) == 1 else parsed
        if name == "train" and owner in self.every:
            self.keep(owner)
        if name in ("to", "cuda", "train", "eval", "half", "bfloat16", "float", "merge_and_unload"):
            return owner
        return self.unknown(node)

    def arguments(self, node: ast.Call, kind: Any) -> Made:
        """Return what a parser makes of one of its classes."""
        if isinstance(kind, Function) and isinstance(kind.node, ast.ClassDef):
            base = next((base for _, base, body in self.classes if body is kind.node), "")
            instance = self.inline(node, kind, [], {})
            if CONFIG.fullmatch(base) and self.file_arguments is None:
                return Made("cli", {}, node)
            if self.file_arguments is None or not isinstance(instance, Made):
                return cast(Made, instance)
            targets = (
                statement.target for statement in kind.node.body if isinstance(statement, ast.AnnAssign)
            )
            fields = {target.id for target in targets if isinstance(target, ast.Name)}
            return self.file_arguments.filled(instance, frozenset(fields) | hf_argument_parser.of_class(base))
        if self.file_arguments is None or not isinstance(kind, Known):
            return Made("cli", {}, node)
        return self.file_arguments.parsed(kind.name.rpartition(".")[2])

    def formatted(self, node: ast.expr, text: str, args: list[Any], named: dict[str, Arg]) -> Any:
        """Return a template with the arguments of str.format filled in."""
        values: list[Any] = []
        number = 0
        for literal, field_name, spec, conversion in Formatter().parse(text):
            values.append(literal)
            if field_name is None:
                continue
            if spec or conversion:
                return self.unknown(node)
            if field_name == "":
                field_name, number = str(number), number + 1
            value = args[int(field_name)] if field_name.isdigit() else named[field_name].value
            values.append(str(value) if isinstance(value, int | float) else value)
        return text_of(values) or self.unknown(node)

    def add_tokens(self, node: ast.Call, tokenizer: Made, tokens: Any) -> Unknown:
        """Note the tokens that are added to a tokenizer, except one for padding, which nothing learns."""
        if isinstance(tokens, dict):
            lists = [tokens[key] for key in tokens if key != "pad_token"]
            tokens = [token for entry in lists for token in (entry if isinstance(entry, list) else [entry])]
        before = tokenizer.args["add_tokens"].value if "add_tokens" in tokenizer.args else []
        every = [tokens] if isinstance(tokens, str) else tokens
        plain = (
            isinstance(every, list)
            and isinstance(before, list)
            and all(isinstance(token, str) for token in every)
        )
        value = [*before, *every] if plain else self.unknown(node)
        if every and self.unsure:
            value = Unknown(self.unsure)
        tokenizer.args["add_tokens"] = Arg(value, node, node.func)
        return self.unknown(node)

    def changed(self, node: ast.Call, owner: Made, name: str, args: list[Any], named: dict[str, Arg]) -> Any:
        """Return a data set after a call to one of its methods."""
        if name in ("map", "filter"):
            function = args[0] if args else named.get("function", Arg(None, node, node)).value
            if not isinstance(function, Function):
                return self.unknown(node)
            key = Arg(getattr(function.node, "name", "lambda"), node.args[0] if node.args else node, node)
            changed_owner = owner.but(told={**owner.told, "function": key})
            return self.over(node, changed_owner, function, name, named)
        if name == "train_test_split":
            size = named.get("test_size") or (Arg(args[0], node.args[0], node) if args else None)
            held = {"test_split_size": size} if size else {}
            parts = {"train": owner.but(told={**owner.told, **held}), "test": owner.but(kind="held")}
            return Made("parts", {key: Arg(part, node, node) for key, part in parts.items()}, node)
        if name in ("select", "take", "shuffle"):
            call = node.args[0] if node.args else None
            count = args[0] if name == "take" and args else None
            if isinstance(call, ast.Call) and unparsed(call.func) == "range" and len(call.args) == 1:
                count = self.value(call.args[0], ChainMap({}))
            if name == "shuffle":
                here, size = Arg(True, node, node.func), named.get("buffer_size")  # of a stream
                order = "dataset_shuffle" if "dataset_streaming" in owner.told else "shuffle"
                more = {"shuffle_dataset": here, "buffer_size": size} if size else {order: here}
                return owner.but(told={**owner.told, **more})
            split = owner.args.get("split")
            if not isinstance(count, int) or split is None or "[" in str(split.value):
                return self.unknown(node)
            statements = {"dataset_shuffle" if k == "shuffle" else k: arg for k, arg in owner.told.items()}
            cut = Arg(f"{split.value}[:{count}]", node, node)
            return owner.but(args={**owner.args, "split": cut}, told=statements)
        if name in ("rename_column", "rename_columns"):
            pairs = args[0] if name.endswith("s") else {args[0]: args[1]}
            renamed = {new: owner.rows.get(old, Column(old)) for old, new in pairs.items()}
            statements = {"function": Arg(name, node, node.func), **owner.told}
            return owner.but(rows={**owner.rows, **renamed}, told=statements)
        if name in ("remove_columns", "select_columns", "with_format", "cast_column", "set_format"):
            return owner
        return self.unknown(node)

    def over(
        self, node: ast.expr, data_rows: Made, function: Function, name: str, named: dict[str, Arg]
    ) -> Made:
        """Return a data set after a function was mapped over its rows."""
        passed: dict[str, Arg] = {}
        if "fn_kwargs" in named and isinstance(named["fn_kwargs"].value, dict):
            passed = {key: Arg(value, node, node) for key, value in named["fn_kwargs"].value.items()}
        row, self.changed_within = Row(dict(data_rows.rows)), ""
        out = Unknown("it selects rows") if name == "filter" else self.inline(node, function, [row], passed)
        if self.changed_within:
            out = Unknown(self.changed_within)
        batched = "batched" in named and bool(named["batched"].value)
        columns = columns_of(out, row, batched)
        if isinstance(out, Made) and out.kind == "tokens":
            data_rows.told |= {key: value for key, value in out.told.items()}
            columns = {"text": out.rows["text"]}
        if columns is not None and "messages" in columns:
            # Unsloth's collator finds the pictures in the messages.
            columns = {name: value for name, value in columns.items() if not _pictures(name, value)}
        if columns is None or not all(map(is_content, columns.values())):
            why = out.why if isinstance(out, Unknown) else "it returns neither a text nor a conversation"
            before, after = before_hand(data_rows.rows)
            step = replace(self.by_hand(function, why), selects=name == "filter")
            step_names = [
                step.copy.name for step in data_rows.steps if isinstance(step, ByHand) and step.copy
            ]
            if not batched and set(named) <= ROW_BY_ROW and self.copier and len(function.node.args.args) == 1:
                verb = "keep" if name == "filter" else "change"
                copy, _ = self.copier.copy(function, f"{verb}_{len(step_names)}" if step_names else verb)
                step = replace(step, copy=copy)
            return data_rows.but(steps=(*data_rows.steps, *before, step), rows=after)
        data_rows.rows |= columns
        return data_rows

    def by_hand(self, function: Function, why: str) -> ByHand:
        node = function.node
        span = self.code.span(node)
        numbers = range(node.lineno, node.end_lineno + 1)
        lines = tuple(conceal(self.code.lines[number - 1]) for number in numbers)
        return ByHand(getattr(node, "name", ""), lines, span, why)


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below a node, without those of functions and classes in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            yield child
            yield from _own(child)


def _pictures(column: str, value: Any) -> bool:
    """Return whether a column is a list of other columns' pictures."""
    return column == "images" and isinstance(value, list) and all(isinstance(item, Column) for item in value)


def _constructs(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and unparsed(node.func).rpartition(".")[2] in TRAINERS


def _loaded(target: ast.expr) -> ast.expr:
    """Turn an assignment's target into an expression."""
    tree = ast.parse(ast.unparse(target), mode="eval").body
    return ast.copy_location(tree, target)
