"""Files for `data.transform`: rows that a recipe's formats do not have, turned into ones that they have.

Each function gives the text of a Python file with one function, named FUNCTION.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compiler.python_text import docstring

FILE, FUNCTION = "convert.py", "convert"
TRANSFORM = f"{FILE}:{FUNCTION}"
"""Of `data.transform`."""

WIDTH = 100


@dataclass(frozen=True)
class Prompt:
    """How a tool writes an instruction as plain text.

    Attributes:
        with_input, without_input: templates of str.format with {instruction} and {input}.
        instruction, input, output: columns; `input` is None where there is none.
        system: template with {system}, "" for no system message from the rows.
        system_column: the column that it stands in.
        default_system: where a row has no such column.
    """

    with_input: str
    without_input: str
    instruction: str = "instruction"
    input: str | None = "input"
    output: str = "output"
    system: str = ""
    system_column: str = "system"
    default_system: str = ""


def prompts(prompt: Prompt, origin: str) -> str:
    """A row with an instruction as a prompt and its completion, both plain text.

    Args:
        origin: whose prompts these are, "Axolotl's alpaca".
    """
    lines = [f'"""Rows as the plain text of {origin}: a prompt, and the completion that is learnt."""', ""]
    if prompt.system:
        lines += constant("SYSTEM", prompt.system)
    if prompt.input is not None:
        lines += constant("WITH_INPUT", prompt.with_input)
        lines += constant("WITHOUT_INPUT", prompt.without_input)
    else:
        lines += constant("PROMPT", prompt.without_input)
    columns = ", ".join(f"`{docstring(c)}`" for c in (prompt.instruction, prompt.input) if c)
    described = f"A row of {columns} and `{docstring(prompt.output)}`."
    lines += ["", "", f"def {FUNCTION}(row):", f'    """{described}"""']
    if prompt.input is not None:
        lines += [
            f"    given = row.get({literal(prompt.input)})",
            "    template = WITH_INPUT if given else WITHOUT_INPUT",
            f"    text = template.format(instruction=row[{literal(prompt.instruction)}], input=given)",
        ]
    else:
        lines.append(f"    text = PROMPT.format(instruction=row[{literal(prompt.instruction)}])")
    if prompt.system:
        default = f", {literal(prompt.default_system)}" if prompt.default_system else ""
        lines += [
            f"    system = row.get({literal(prompt.system_column)}{default})",
            "    if system:",
            "        text = SYSTEM.format(system=system) + text",
        ]
    lines.append(f'    return {{"prompt": text, "completion": row[{literal(prompt.output)}]}}')
    return "\n".join(lines) + "\n"


def segments() -> str:
    """Axolotl's input_output: segments, each learnt or not."""
    return f'''"""Rows of segments as the text before the first that is learnt, and the text from there on."""


def {FUNCTION}(row):
    """A row of `segments`; one whose learnt segments are not the last ones is left out."""
    labels = [bool(segment["label"]) for segment in row["segments"]]
    if True not in labels or False in labels[labels.index(True) :]:
        return None
    texts = [segment["text"] for segment in row["segments"]]
    first = labels.index(True)
    return {{"prompt": "".join(texts[:first]), "completion": "".join(texts[first:])}}
'''


@dataclass(frozen=True)
class Alpaca:
    """LLaMA-Factory's columns of an alpaca data set; None for one that there is not."""

    prompt: str | None = "instruction"
    query: str | None = "input"
    response: str | None = "output"
    history: str | None = None
    system: str | None = None
    chosen: str | None = None
    rejected: str | None = None


def alpaca(columns: Alpaca, ranking: bool, chats: Mapping[str, str] | None = None) -> str:
    """LLaMA-Factory's alpaca rows as messages: instruction and input are joined by a line break.

    Args:
        ranking: whether a row has two answers, for preferences.
        chats: `data.fields` of conversations that are among the rows, which pass as they are.
    """
    fields = {"messages": "messages", "role": "role", "content": "content", **(chats or {})}
    user, assistant, system = (
        f'{{{literal(fields["role"])}: "{role}", {literal(fields["content"])}: '
        for role in ("user", "assistant", "system")
    )
    asked = [column for column in (columns.prompt, columns.query) if column]
    named = " and ".join(f"`{docstring(column)}`" for column in asked)
    lines = ['"""Rows of instructions as messages, as LLaMA-Factory joins them."""', "", ""]
    lines += [f"def {FUNCTION}(row):", f'    """A row of {named}{", or a conversation" if chats else ""}."""']
    response = literal(columns.response or "output")
    if chats:
        lines += [
            f"    if row.get({literal(fields['messages'])}) is not None:",
            f"        if row.get({response}) is not None:",
            '            raise ValueError("the row is both an instruction and a conversation")',
            "        return row",
        ]
    lines.append("    messages = []")
    if columns.system:
        lines += [
            f"    if row.get({literal(columns.system)}):",
            f"        messages.append({system}row[{literal(columns.system)}]}})",
        ]
    if columns.history:
        lines += [
            f"    for question, answer in row.get({literal(columns.history)}) or []:",
            f"        messages.append({user}question}})",
            f"        messages.append({assistant}answer}})",
        ]
    parts = ", ".join(f"row.get({literal(column)})" for column in asked)
    lines.append(
        f'    asked = "\\n".join(part for part in ({parts}{"," if len(asked) == 1 else ""}) if part)'
    )
    lines.append(f"    messages.append({user}asked}})")
    if ranking:
        chosen, rejected = literal(columns.chosen or "chosen"), literal(columns.rejected or "rejected")
        lines += [
            "    return {",
            '        "prompt": messages,',
            f'        "chosen": [{{"role": "assistant", "content": row[{chosen}]}}],',
            f'        "rejected": [{{"role": "assistant", "content": row[{rejected}]}}],',
            "    }",
        ]
    else:
        made = f"[*messages, {assistant}row[{response}]}}]"
        lines.append(f"    return {{{literal(fields['messages'])}: {made}}}")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Tagged:
    """How a conversation's messages are tagged.

    Attributes:
        messages: the column of the conversation.
        role, content: keys of a message.
        roles: what each role is called here, by the data's own word; {} for the same words.
        system: a column with the system message, None for none.
        chosen, rejected: columns of the two answers, for preferences.
    """

    messages: str
    role: str = "role"
    content: str = "content"
    roles: Mapping[str, str] | None = None
    system: str | None = None
    chosen: str | None = None
    rejected: str | None = None


def tagged(tags: Tagged) -> str:
    """Conversations with keys or roles of their own as messages; preferences where there are two answers."""
    lines = ['"""Conversations as messages of role and content."""', ""]
    lines += _roles(tags.roles or {})
    lines += ["", f"def {FUNCTION}(row):"]
    described = f"A row of `{docstring(tags.messages)}`" + (" and two answers." if tags.chosen else ".")
    lines.append(f'    """{described}"""')
    lines.append(f"    messages = [plain(message) for message in row[{literal(tags.messages)}]]")
    if tags.system:
        lines += [
            f'    if row.get({literal(tags.system)}) and messages[0]["role"] != "system":',
            f'        messages.insert(0, {{"role": "system", "content": row[{literal(tags.system)}]}})',
        ]
    if tags.chosen and tags.rejected:
        lines += [
            "    return {",
            '        "prompt": messages,',
            f'        "chosen": answer(row[{literal(tags.chosen)}]),',
            f'        "rejected": answer(row[{literal(tags.rejected)}]),',
            "    }",
        ]
    else:
        lines.append('    return {"messages": messages}')
    role = f"message[{literal(tags.role)}]"
    role = f"ROLES[{role}]" if tags.roles else role
    lines += ["", "", "def plain(message):", '    """A message by the names that templates know."""']
    lines.append(f'    return {{"role": {role}, "content": message[{literal(tags.content)}]}}')
    if tags.chosen:
        lines += [
            "",
            "",
            "def answer(given):",
            '    """An answer: text, a message, or a conversation that ends in one."""',
            "    if isinstance(given, str):",
            '        return [{"role": "assistant", "content": given}]',
            "    return [plain(given[-1] if isinstance(given, list) else given)]",
        ]
    return "\n".join(lines) + "\n"


def _roles(roles: Mapping[str, str]) -> list[str]:
    if not roles:
        return []
    pairs = [f"{literal(word)}: {literal(role)}" for word, role in roles.items()]
    one = f"ROLES = {{{', '.join(pairs)}}}"
    return [one, ""] if len(one) <= WIDTH else ["ROLES = {", *(f"    {pair}," for pair in pairs), "}", ""]


def constant(name: str, text: str) -> list[str]:
    """An assignment of a text, cut at its line breaks and blanks where it is long."""
    one = f"{name} = {literal(text)}"
    if len(one) <= WIDTH:
        return [one]
    pieces: list[str] = []
    for line in text.splitlines(keepends=True):
        piece = ""
        for word in line.replace(" ", " \0").split("\0"):
            if piece and len(literal(piece + word)) > WIDTH - 4:
                pieces.append(piece)
                piece = ""
            piece += word
        pieces.append(piece)
    return [f"{name} = (", *(f"    {literal(piece)}" for piece in pieces), ")"]


def literal(text: str) -> str:
    """A Python literal in double quotes."""
    made = repr(text)
    if made.startswith('"'):
        return made
    return '"' + made[1:-1].replace("\\'", "'").replace('"', '\\"') + '"'


_TASK = "Below is an instruction that describes a task"
_COMPLETES = "Write a response that appropriately completes the request.\n\n"
WITH_INPUT = (
    f"{_TASK}, paired with an input that provides further context. {_COMPLETES}"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
WITHOUT_INPUT = f"{_TASK}. {_COMPLETES}### Instruction:\n{{instruction}}\n\n### Response:\n"


def alpaca_prompt(columns: Mapping[str, str] | None = None) -> Prompt:
    """Alpaca's prompt.

    Args:
        columns: instruction, input and output to the source's own names.
    """
    return Prompt(WITH_INPUT, WITHOUT_INPUT, **dict(columns or {}))


def alpaca_messages(made: Prompt, origin: str) -> str:
    """A file that makes a conversation of a row: the prompt the user's, the output the assistant's.

    Args:
        origin: whose prompts these are.
    """
    asked = literal(made.instruction)
    lines = [
        f'"""Rows as conversations with {origin}: the prompt is the user\'s message."""',
        "",
        *constant("WITH_INPUT", made.with_input),
        *constant("WITHOUT_INPUT", made.without_input),
        *("", "", f"def {FUNCTION}(row):"),
        f'    """A row of `{made.instruction}`, `{made.input}` and `{made.output}`."""',
        f"    given = row.get({literal(str(made.input))})",
        "    template = WITH_INPUT if given else WITHOUT_INPUT",
        f"    prompt = template.format(instruction=row[{asked}], input=given)",
        f"    answer = row[{literal(made.output)}]",
        *_conversation("prompt", "answer"),
    ]
    return "\n".join(lines) + "\n"


def paired(asked: str, answered: str, system: str | None = None) -> str:
    """A file that makes a conversation of two columns.

    Args:
        system: a system message for all rows.
    """
    lines = ['"""Rows of two columns as conversations of a question and its answer."""', ""]
    if system is not None:
        lines += constant("SYSTEM", system)
    lines += [
        *("", "", f"def {FUNCTION}(row):"),
        f'    """A row of `{asked}` and `{answered}`."""',
        *_conversation(f"row[{literal(asked)}]", f"row[{literal(answered)}]", system is not None),
    ]
    return "\n".join(lines) + "\n"


def _conversation(user: str, assistant: str, system: bool = False) -> list[str]:
    first = ['            {"role": "system", "content": SYSTEM},'] if system else []
    return [
        "    return {",
        '        "messages": [',
        *first,
        f'            {{"role": "user", "content": {user}}},',
        f'            {{"role": "assistant", "content": {assistant}}},',
        "        ]",
        "    }",
    ]
