"""Write port/data/chat_templates.json: what the tools' named chat templates write around messages.

    .venv/bin/python -m recipec.port.scripts.chat_templates WHEELS

WHEELS is the folder that port/scripts/dialects.py reads. Nothing is imported. LLaMA-Factory's and ms-swift's
templates are read from the calls that register them. Those of Axolotl, oumi and Unsloth are Jinja, and are
rendered for a few conversations to get the texts between messages. An entry is a row of
`meaning.templates.Turns`, where {bos_token} and {eos_token} stand for the tokenizer's own, or the reason
why the template has no such row.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from recipec.port.meaning.templates import Turns, turns_of, written
from recipec.port.scripts.dialects import Package, calls, kept, lineage
from recipec.runtime.data.template import ChatTemplate
from recipec.runtime.errors import UserError

OUTPUT = Path(__file__).resolve().parents[1] / "data" / "chat_templates.json"

Row = dict[str, Any]
Talk = list[dict[str, str]]


def main() -> int:
    OUTPUT.write_text(text(catalog(Path(sys.argv[1]))), encoding="utf-8")
    return 0


def catalog(wheels: Path) -> dict[str, Any]:
    """Return all tools: {"swift": {"version": ..., "templates": {name: row or reason}}}."""
    rows = {
        "llamafactory": (Package("llamafactory", wheels), llamafactory),
        "swift": (Package("ms_swift", wheels), swift),
        "axolotl": (Package("axolotl", wheels), axolotl),
        "oumi": (Package("oumi", wheels), oumi),
        "unsloth": (Package("unsloth", wheels), unsloth),
    }
    read_tools = {
        tool: {"version": package.version, "templates": dict(sorted(read(package).items()))}
        for tool, (package, read) in rows.items()
    }
    return {**read_tools, "open_instruct": kept(wheels, "open_instruct", OUTPUT, open_instruct)}


def text(data: Mapping[str, Any]) -> str:
    """Return the file's text, one template a line."""
    tools = []
    for tool, entry in data.items():
        rows = ",\n".join(f"   {_json(name)}: {_json(row)}" for name, row in entry["templates"].items())
        tools.append(
            f' {_json(tool)}: {{"version": {_json(entry["version"])}, "templates": {{\n{rows}\n }}}}'
        )
    return "{\n" + ",\n".join(tools) + "\n}\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


CLASSES = ("Template", "ReasoningTemplate", "Llama2Template")
"""LLaMA-Factory's classes of templates that consist of turns: plain, with a thought, with the system message
in the first user message."""


def llamafactory(package: Package) -> dict[str, Row | str]:
    out: dict[str, Row | str] = {}
    for call in calls(package.tree("llamafactory/data/template.py"), "register_template"):
        arguments = {word.arg: word.value for word in call.keywords}
        kind = ast.unparse(arguments["template_class"]) if "template_class" in arguments else "Template"
        name = ast.literal_eval(arguments["name"])
        try:
            out[name] = _llamafactory(arguments, kind)
        except ValueError as error:
            out[name] = str(error)
    return out


def _llamafactory(arguments: Mapping[str, ast.expr], kind: str) -> Row:
    if kind not in CLASSES:
        raise ValueError(f"{kind} writes it with its own code")

    def slots(key: str, default: str) -> str:
        if key not in arguments:
            return default
        call = arguments[key]
        assert isinstance(call, ast.Call)
        (slot_list,) = (word.value for word in call.keywords if word.arg == "slots")
        assert isinstance(slot_list, ast.List)
        return "".join(map(_slot, slot_list.elts)).replace("{{content}}", "{}")

    efficient = "efficient_eos" in arguments and ast.literal_eval(arguments["efficient_eos"])
    user, opening = split(slots("format_user", "{}"))
    thought = ("<think>\n", "\n</think>\n\n")
    call_argument = {
        "user": user,
        "assistant": slots("format_assistant", "{}" if efficient else "{}{eos_token}"),
        "opening": opening,
        "system": slots("format_system", "{}"),
        "prefix": slots("format_prefix", ""),
        "default_system": ast.literal_eval(arguments["default_system"])
        if "default_system" in arguments
        else "",
        "in_user": kind == "Llama2Template",
        "thought": (ast.literal_eval(arguments["thought_words"]) if "thought_words" in arguments else thought)
        if kind == "ReasoningTemplate"
        else None,
        "last": "{eos_token}" if efficient else "",
    }
    if "replace_eos" in arguments:  # the first stop word replaces the tokenizer's end token
        stop = ast.literal_eval(arguments["stop_words"])[0]
        call_argument = {
            k: v.replace("{eos_token}", stop) if isinstance(v, str) else v for k, v in call_argument.items()
        }
    return row(call_argument)


def _slot(node: ast.expr) -> str:
    value = ast.literal_eval(node)
    if isinstance(value, set):
        return "".join(f"{{{name}}}" for name in value if name in ("bos_token", "eos_token"))
    if isinstance(value, dict):
        raise ValueError("it names the tokens of its markers, whatever the tokenizer has")
    return str(value)


def row(values: Mapping[str, Any]) -> Row:
    """Drop values that equal their defaults."""
    default = {field.name: field.default for field in fields(Turns)}
    return {key: value for key, value in values.items() if value != default[key]}


def split(turn: str) -> tuple[str, str]:
    """Split a text into what follows the user's message, and what opens the answer.

    The answer's mark begins like the user's, or with the assistant's name.
    """
    before, _, after = turn.partition("{}")
    for length in range(len(before), 1, -1):
        at = after.rfind(before[:length])
        if at >= 0:
            return f"{before}{{}}{after[:at]}", after[at:]
    named = re.search(r"(?i:assistant|model)\b.*\Z", after, re.DOTALL)
    at = named.start() if named else len(after)
    return f"{before}{{}}{after[:at]}", after[at:]


SYSTEM, QUERY = "{{SYSTEM}}", "{{QUERY}}"
OWN_WAY = (
    "_swift_encode",
    "_jinja_encode",
    "_get_system",
    "_add_non_thinking_prefix",
    "_swift_prepare_inputs",
    "_get_std_messages",
    "_concat_context_list",
    "_preprocess_inputs",
)
"""Methods of ms-swift's templates; a template that overrides one of them writes other texts."""
THOUGHT = "<think>", "</think>"
"""The tags of a thought; ms-swift puts no thought before an answer that begins with the first."""


def swift(package: Package) -> dict[str, Row | str]:
    modules = {path: package.tree(path) for path in package.paths("swift/template/templates/", ".py")}
    kinds = _constants(package.tree("swift/template/constant.py").body)
    every = {name: text for module in modules.values() for name, text in _constants(module.body).items()}
    scopes = {path: {**every, **_constants(module.body)} for path, module in modules.items()}
    meta_names: dict[str, Names] = {}
    classes = package.classes("swift/template/template_meta.py", "swift/template/base.py")
    for path, module in modules.items():
        class_nodes = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
        classes |= class_nodes
        meta_names |= dict.fromkeys(class_nodes, scopes[path])
    out: dict[str, Row | str] = {}
    for path, module in modules.items():
        for call in calls(module, "register_template"):
            (argument,) = call.args
            assert isinstance(argument, ast.Call)
            (title,) = argument.args[:1] or [
                word.value for word in argument.keywords if word.arg == "template_type"
            ]
            name = kinds.get(ast.unparse(title).rpartition(".")[2]) or ast.literal_eval(title)
            try:
                out[name] = _swift(_meta(argument, classes, meta_names, scopes[path]), classes)
            except ValueError as error:
                out[name] = str(error)
    return out


def _constants(body: Iterable[ast.stmt]) -> dict[str, str]:
    """Return the texts that names stand for in a module or in one of its classes."""
    out: dict[str, str] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            out |= _constants(node.body)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with suppress(ValueError):
                if isinstance(value := ast.literal_eval(node.value), str):
                    out[node.targets[0].id] = value
    return out


Names = Mapping[str, str]


def _meta(
    call: ast.Call, classes: Mapping[str, ast.ClassDef], module_names: Mapping[str, Names], names: Names
) -> dict[str, Any]:
    """Return the fields of a TemplateMeta: those that the call gives, over its class's.

    Args:
        own: the texts that names stand for where each class is defined.
        names: the texts that names stand for where the call is.
    """
    order: dict[str, None] = {}
    arguments: dict[str, tuple[ast.expr, Names]] = {}
    for base in reversed(lineage(classes, ast.unparse(call.func))):
        for node in classes[base].body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                order[node.target.id] = None
                arguments |= (
                    {node.target.id: (node.value, module_names.get(base, names))} if node.value else {}
                )
    positional = dict(zip(list(order)[1:], call.args[1:], strict=False))
    positional |= {word.arg: word.value for word in call.keywords if word.arg}
    arguments |= {key: (value, names) for key, value in positional.items()}
    return {key: _meant(key, *value) for key, value in arguments.items()}


def _meant(key: str, node: ast.expr, names: Names) -> Any:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "field":
        (argument,) = (word.value for word in node.keywords)
        if ast.unparse(argument) == "list":
            return []
        node = argument.body if isinstance(argument, ast.Lambda) else argument
    if key in ("template_cls", "agent_template"):
        return ast.unparse(node)
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"its {key} comes from code: {ast.unparse(node)[:60]}") from None


def _swift(meta: Mapping[str, Any], classes: Mapping[str, ast.ClassDef]) -> Row:
    """Return the row of a template that learns answers, and also its suffix after each answer."""
    for base in lineage(classes, meta["template_cls"]):
        methods = {node.name for node in classes[base].body if isinstance(node, ast.FunctionDef)}
        if base != "Template" and methods.intersection(OWN_WAY):
            raise ValueError(f"{base} writes it with its own code")
    empty = meta["non_thinking_prefix"]
    if meta["preserve_thinking"] is False:
        raise ValueError("it removes the reasoning from earlier answers")
    if empty and not (empty.startswith(THOUGHT[0]) and THOUGHT[1] in empty):
        raise ValueError("it writes an empty thought differently from other thoughts")
    if meta["chat_sep"] is None:
        raise ValueError("it is only for one question and its answer")
    keys = ("prefix", "prompt", "chat_sep", "suffix", "system_prefix")
    prefix, prompt, between, suffix, system = (_prompt(meta[key]) for key in keys)
    if "{{ROUND" in prompt:
        raise ValueError("it counts the questions")
    if SYSTEM in prompt:
        raise ValueError("it writes the system message before the last question")
    if SYSTEM in prefix:
        prefix, system = prefix.replace(SYSTEM, ""), prefix
    if not system.startswith(prefix) and system:
        raise ValueError("it begins differently with a system message")
    user, opening = split(prompt.replace(QUERY, "{}"))
    ends = between.startswith(suffix)
    if suffix and not ends and (between + user).startswith(suffix):
        raise ValueError("its loss covers the beginning of the next question")
    return row(
        {
            "user": user,
            "opening": opening,
            "assistant": "{}" + (suffix if ends else ""),
            "between": between.removeprefix(suffix) if ends else between,
            "last": "" if ends else suffix,
            "prefix": prefix,
            "system": system.removeprefix(prefix).replace(SYSTEM, "{}"),
            "default_system": meta["default_system"] or "",
            "adds_bos": meta["auto_add_bos"],
            "thought": _thought(empty) if empty else None,
            "learns_empty": not (empty and meta["is_thinking"]),
            "forgets": bool(empty or meta["is_thinking"]) and not meta["preserve_thinking"],
        }
    )


def _thought(empty: str) -> tuple[str, str]:
    begins, end, after = empty.partition(THOUGHT[1])
    return begins, end + after


def _prompt(parts: Sequence[str | Sequence[Any]] | None) -> str:
    """Join a prompt of ms-swift: texts, and lists of token names."""
    tokens = {("bos_token_id",): "{bos_token}", ("eos_token_id",): "{eos_token}"}
    try:
        return "".join(part if isinstance(part, str) else tokens[tuple(part)] for part in parts or ())
    except KeyError as error:
        raise ValueError(f"it writes tokens by number: {error}") from None


def axolotl(package: Package) -> dict[str, Row | str]:
    """Return Axolotl's templates; the end of a turn is learned, without the blanks after it."""
    return {name: turns(text, _ended) for name, text in axolotl_texts(package).items()}


def axolotl_texts(package: Package) -> dict[str, str]:
    """Return Axolotl's templates as Jinja."""
    return dict(_files(package, "axolotl/utils/chat_templates/"))


def oumi(package: Package) -> dict[str, Row | str]:
    return {name: turns(text) for name, text in _files(package, "oumi/datasets/chat_templates/")}


def open_instruct(package: Package) -> dict[str, Any]:
    texts = _assigned(package.tree("open_instruct/dataset_transformation.py"), "CHAT_TEMPLATES")
    rows = {name: turns(text) for name, text in sorted(texts.items())}
    return {"version": package.version, "templates": rows}


def _assigned(module: ast.Module, name: str) -> dict[str, str]:
    """Return a table of texts that a module assigns to a name."""
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            table: dict[str, str] = ast.literal_eval(node.value)
            return table
    raise KeyError(name)


def _files(package: Package, folder: str) -> Iterator[tuple[str, str]]:
    for path in package.paths(folder, ".jinja"):
        yield Path(path).stem, package.text(path)


def unsloth(package: Package) -> dict[str, Row | str]:
    return {name: turns(text) for name, text in unsloth_texts(package).items()}


def unsloth_texts(package: Package) -> dict[str, str]:
    """Return the entries of CHAT_TEMPLATES as Jinja, with their default system messages."""
    texts: dict[str, Any] = {}
    tables: dict[str, dict[str, Any]] = {"CHAT_TEMPLATES": {}, "DEFAULT_SYSTEM_MESSAGE": {}}
    for node in package.tree("unsloth/chat_templates.py").body:
        for name, assigned in _assignments(node):
            (target,) = assigned.targets
            value = _evaluated(assigned.value, texts, tables)
            if isinstance(target, ast.Name):
                texts[target.id] = value
            elif isinstance(target, ast.Subscript) and ast.unparse(target.value) in tables:
                tables[ast.unparse(target.value)][name or ast.literal_eval(target.slice)] = value
    systems = tables["DEFAULT_SYSTEM_MESSAGE"]
    quoted = {
        name: str(system or "").replace("\\'", "'").replace("'", "\\'") for name, system in systems.items()
    }
    return {
        name: str(text).replace("{system_message}", quoted.get(name, ""))
        for name, text in tables["CHAT_TEMPLATES"].items()
    }


def _assignments(node: ast.stmt) -> Iterator[tuple[str, ast.Assign]]:
    """Yield an assignment, or those of a loop over constants with the value of the loop's variable."""
    if isinstance(node, ast.Assign):
        yield "", node
    elif isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple):
        for value in node.iter.elts:
            for inner in node.body:
                if isinstance(inner, ast.Assign):
                    yield ast.literal_eval(value), inner


def _evaluated(node: ast.expr, texts: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]) -> Any:
    """Evaluate a text, the first of several texts, or a name for one; return None for anything else."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return texts.get(name)
        case ast.Tuple(elts=[first, *_]):
            return _evaluated(first, texts, tables)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            parts = [_evaluated(part, texts, tables) for part in (left, right)]
            return "".join(parts) if all(isinstance(part, str) for part in parts) else None
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=key)) if name in tables:
            return tables[name].get(key)
    return None


LONGEST = 1500
"""The most characters of a text in a row."""
BOS, EOS = "\1BOS\1", "\1EOS\1"
ROLES = ("system", "user", "assistant")
TALK: Talk = [
    {"role": role, "content": f"\2{role}{turn}\2"} for turn in (0, 1) for role in ("user", "assistant")
]
TOLD = [{"role": "system", "content": "\2system0\2"}, *TALK]


def turns(jinja: str, learned: Callable[[Row], Row] = dict) -> Row | str:
    """Return a Jinja template as turns, or the reason why it cannot be."""
    if "strftime_now" in jinja:
        return "it writes the date of the run"
    try:
        template = ChatTemplate(jinja, {"bos_token": BOS, "eos_token": EOS})
        described = learned(row(_probed(template)))
        _same(template, described)
    except Refused:
        return "it refuses a plain conversation"
    except ValueError as error:
        return str(error)
    return described


class Refused(Exception):
    """A template raised an error for a conversation."""


def _render(template: ChatTemplate, talk: Talk, opened: bool = False) -> str:
    try:
        return template.render(talk, add_generation_prompt=opened)
    except (UserError, ValueError) as error:
        raise Refused from error


def _texts(template: ChatTemplate, talk: Talk, opened: bool = False) -> list[str]:
    """Return the texts before, between and after the messages of a conversation."""
    text = _render(template, talk, opened)
    parts = re.split("|".join(re.escape(message["content"]) for message in talk), text)
    if len(parts) != len(talk) + 1:
        raise ValueError("it does not write each message once")
    return [part.replace(BOS, "{bos_token}").replace(EOS, "{eos_token}") for part in parts]


def _probed(template: ChatTemplate) -> Row:
    before, opening, next_one, again, end = _texts(template, TALK)
    if again != opening:
        raise ValueError("it opens answers differently, for example with reasoning")
    if next_one.startswith(end) and before.endswith(next_one.removeprefix(end)):
        tail, head, between, last = end, next_one.removeprefix(end), "", ""
    else:
        head = next(before[at:] for at in range(len(before) + 1) if next_one.endswith(before[at:]))
        rest = next_one.removesuffix(head)
        if end.startswith(rest):
            tail, between, last = rest, "", end.removeprefix(rest)
        elif rest.startswith(end):
            tail, between, last = end, rest.removeprefix(end), ""
        else:
            raise ValueError("its last answer ends differently")
    prefix = before.removesuffix(head)
    user, opens = split(f"{head}{{}}{opening}")
    texts = {"user": user, "opening": opens, "assistant": "{}" + tail, "between": between, "last": last}
    asked = _texts(template, TALK[:1], opened=True)[1]
    if asked != opening:
        texts["generation"] = asked.removeprefix(after := user.partition("{}")[2])
        if not asked.startswith(after):
            raise ValueError("it opens an answer differently if it asks for one")
    if len(prefix) > LONGEST:
        raise ValueError("its beginning is too long to write out")
    texts["trims"] = tuple(role for role in ROLES if _trims(template, role))
    return texts | _system(template, prefix, head)


def _system(template: ChatTemplate, prefix: str, head: str) -> Row:
    """Return how a system message is written.

    Args:
        prefix: the text before the first question if there is no system message.
        head: the text that opens a question.
    """
    try:
        first, second, *_ = _texts(template, TOLD)
    except Refused:
        return {"prefix": prefix, "system": ""}
    if first == prefix + head:
        return {"prefix": prefix, "system": "{}" + second, "in_user": True}
    if not second.endswith(head):
        raise ValueError("it writes the first question differently with a system message")
    after = second.removesuffix(head)
    if first.startswith(prefix):
        return {"prefix": prefix, "system": first.removeprefix(prefix) + "{}" + after}
    default = prefix.removeprefix(first).removesuffix(after)
    if not prefix.startswith(first):
        raise ValueError("it begins differently without a system message")
    bos = "{bos_token}" if first.startswith("{bos_token}") else ""
    absent = {"default_system": default} if default else {"always_told": True}
    return {"prefix": bos, "system": first.removeprefix(bos) + "{}" + after, **absent}


def _trims(template: ChatTemplate, role: str) -> bool:
    plain = TOLD if role == "system" else TALK
    talk = [
        {**message, "content": f" {message['content']} "} if message["role"] == role else message
        for message in plain
    ]
    try:
        return f" \2{role}0\2 " not in _render(template, talk)
    except Refused:
        return False


def _same(template: ChatTemplate, described: Row) -> None:
    """Check that the row's own Jinja writes the same as the template; raise ValueError otherwise."""
    ours = ChatTemplate(written(turns_of(described)), {"bos_token": BOS, "eos_token": EOS})
    stated = [] if described.get("system") == "" else [TOLD]
    for talk in (part[:end] for part in (TALK, *stated) for end in range(2, len(part) + 1)):
        for form, why in FORMS.items():
            messages = [{**message, "content": form.format(message["content"])} for message in talk]
            opened = talk[-1]["role"] == "user"
            if _render(template, messages, opened) != _render(ours, messages, opened):
                raise ValueError(why)


FORMS = {
    "{}": "its turns depend on each other",
    " {}\n": "it takes blanks off some of the messages",
    "<think>\nhm\n</think>\n\n{}": "it rewrites thoughts",
    "<|channel>thought\nhm<channel|>{}": "it rewrites thoughts",
}
"""Forms of a message, and what the template does if it then differs from the row."""


def _ended(described: Row) -> Row:
    """Move the blanks after an answer out of the learned text."""
    answer = described["assistant"].rstrip()
    blanks = described["assistant"].removeprefix(answer)
    return described | ({"assistant": answer, "after": blanks} if blanks else {})


if __name__ == "__main__":
    sys.exit(main())
