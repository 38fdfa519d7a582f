"""Files for `data.transform`: they turn rows that a recipe's formats do not cover into rows that they do.

Each function returns the text of a Python file with one function, named FUNCTION.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recipec.compiler.python_text import docstring

FILE, FUNCTION = "convert.py", "convert"
TRANSFORM = f"{FILE}:{FUNCTION}"
"""The recipe's value of `data.transform`."""

WIDTH = 100


@dataclass(frozen=True)
class Prompt:
    """How a tool writes an instruction as plain text.

    Attributes:
        with_input, without_input: str.format templates with {instruction} and {input}.
        instruction, input, output: columns; `input` is None if there is none.
        system: a template with {system}; "" if rows have no system message.
        system_column: the column with the system message.
        default_system: the system message of rows without that column.
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
    """Write a row with an instruction as a prompt and a completion, both plain text."""
    columns = ", ".join(f"`{docstring(c)}`" for c in (prompt.instruction, prompt.input) if c)
    asked = f"row[{literal(prompt.instruction)}]"
    system = constant("SYSTEM", prompt.system) if prompt.system else ""
    if prompt.input is None:
        templates = constant("PROMPT", prompt.without_input)
        body = f"    text = PROMPT.format(instruction={asked})\n"
    else:
        templates = _templates(prompt)
        body = f"""\
    given = row.get({literal(prompt.input)})
    template = WITH_INPUT if given else WITHOUT_INPUT
    text = template.format(instruction={asked}, input=given)
"""
    if prompt.system:
        default = f", {literal(prompt.default_system)}" if prompt.default_system else ""
        body += f"""\
    system = row.get({literal(prompt.system_column)}{default})
    if system:
        text = SYSTEM.format(system=system) + text
"""
    return f'''"""Rows as the plain text of {origin}: a prompt, and the completion that is learned."""

{system}{templates}

def {FUNCTION}(row):
    """A row of {columns} and `{docstring(prompt.output)}`."""
{body}    return {{"prompt": text, "completion": row[{literal(prompt.output)}]}}
'''


def segments() -> str:
    """Convert Axolotl's input_output: segments, each trained on or not."""
    return f'''"""Rows of segments as the text before the first learned one, and the text from there on."""


def {FUNCTION}(row):
    """A row of `segments`; one whose learned segments are not the last ones is left out."""
    labels = [bool(segment["label"]) for segment in row["segments"]]
    if True not in labels or False in labels[labels.index(True) :]:
        return None
    texts = [segment["text"] for segment in row["segments"]]
    first = labels.index(True)
    return {{"prompt": "".join(texts[:first]), "completion": "".join(texts[first:])}}
'''


def without_system(messages: str, role: str) -> str:
    """Remove the system message at the beginning of a conversation."""
    return f'''"""Conversations without the system message at their beginning."""


def {FUNCTION}(row):
    """A row of `{docstring(messages)}`."""
    messages = row[{literal(messages)}]
    if messages and messages[0][{literal(role)}] == "system":
        messages = messages[1:]
    return {{**row, {literal(messages)}: messages}}
'''


@dataclass(frozen=True)
class Alpaca:
    """The columns of an alpaca data set of LLaMA-Factory. A missing column is None.

    Attributes:
        images: the column of pictures, which conversations pass on.
    """

    prompt: str | None = "instruction"
    query: str | None = "input"
    response: str | None = "output"
    history: str | None = None
    system: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    label: str | None = None
    images: str | None = None


def alpaca(columns: Alpaca, ranking: bool, chats: Mapping[str, str] | None = None) -> str:
    """Convert LLaMA-Factory's alpaca rows to messages. Instruction and input are joined by a line break.

    Args:
        ranking: whether a row has two answers, for preferences.
        chats: the `data.fields` of conversations among the rows, which pass unchanged.
    """
    names = {"messages": "messages", "role": "role", "content": "content", **(chats or {})}
    messages, role, content = (literal(names[name]) for name in ("messages", "role", "content"))
    user, assistant, system = (f'{role}: "{name}", {content}: ' for name in ("user", "assistant", "system"))
    asked = [column for column in (columns.prompt, columns.query) if column]
    named = " and ".join(f"`{docstring(column)}`" for column in asked)
    response = literal(columns.response or "output")
    body = ""
    if chats:
        body += f"""\
    if row.get({messages}) is not None:
        if row.get({response}) is not None:
            raise ValueError("the row is both an instruction and a conversation")
        return row
"""
    body += "    messages = []\n"
    if columns.system:
        body += f"""\
    if row.get({literal(columns.system)}):
        messages.append({{{system}row[{literal(columns.system)}]}})
"""
    if columns.history:
        body += f"""\
    for question, answer in row.get({literal(columns.history)}) or []:
        messages.append({{{user}question}})
        messages.append({{{assistant}answer}})
"""
    parts = ", ".join(f"row.get({literal(column)})" for column in asked)
    body += f"""\
    asked = "\\n".join(part for part in ({parts}{"," if len(asked) == 1 else ""}) if part)
    messages.append({{{user}asked}})
"""
    if ranking:
        body += f"""\
    return {{
        "prompt": messages,
        "chosen": [{{"role": "assistant", "content": row[{literal(columns.chosen or "chosen")}]}}],
        "rejected": [{{"role": "assistant", "content": row[{literal(columns.rejected or "rejected")}]}}],
    }}
"""
    elif columns.label:
        body += f"""\
    return {{
        "prompt": messages,
        "completion": [{{"role": "assistant", "content": row[{response}]}}],
        "label": row[{literal(columns.label)}],
    }}
"""
    else:
        pictures = _pictures(columns.images)
        body += f"    return {{{messages}: [*messages, {{{assistant}row[{response}]}}]{pictures}}}\n"
    return f'''"""Rows of instructions as messages, as LLaMA-Factory joins them."""


def {FUNCTION}(row):
    """A row of {named}{", or a conversation" if chats else ""}."""
{body}'''


@dataclass(frozen=True)
class Tagged:
    """The tags of a conversation's messages.

    Attributes:
        messages: the column of the conversation.
        role, content: the keys of a message.
        roles: the recipe's role by the data's own word; {} if the words are the same.
        system: the column with the system message, None for none.
        chosen, rejected: the columns of the two answers, for preferences.
        label: the column that says whether the last message is desirable, None for none.
        images: the column of pictures, None for none.
    """

    messages: str
    role: str = "role"
    content: str = "content"
    roles: Mapping[str, str] | None = None
    system: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    label: str | None = None
    images: str | None = None


def tagged(tags: Tagged) -> str:
    """Convert conversations with other keys or roles to messages, or to preferences with two answers."""
    role = f"ROLES[message[{literal(tags.role)}]]" if tags.roles else f"message[{literal(tags.role)}]"
    system = answer = ""
    returned = f'    return {{"messages": messages{_pictures(tags.images)}}}\n'
    if tags.label:
        label = f'"label": row[{literal(tags.label)}]'
        returned = f'    return {{"prompt": messages[:-1], "completion": messages[-1:], {label}}}\n'
    if tags.system:
        system = f"""\
    if row.get({literal(tags.system)}) and messages[0]["role"] != "system":
        messages.insert(0, {{"role": "system", "content": row[{literal(tags.system)}]}})
"""
    if tags.chosen and tags.rejected:
        returned = f"""\
    return {{
        "prompt": messages,
        "chosen": answer(row[{literal(tags.chosen)}]),
        "rejected": answer(row[{literal(tags.rejected)}]),
    }}
"""
    if tags.chosen:
        answer = '''

def answer(given):
    """An answer: text, a message, or a conversation that ends in one."""
    if isinstance(given, str):
        return [{"role": "assistant", "content": given}]
    return [plain(given[-1] if isinstance(given, list) else given)]
'''
    return f'''"""Conversations as messages of role and content."""

{_roles(tags.roles or {})}
def {FUNCTION}(row):
    """A row of `{docstring(tags.messages)}`{" and two answers" if tags.chosen else ""}."""
    messages = [plain(message) for message in row[{literal(tags.messages)}]]
{system}{returned}

def plain(message):
    """A message by the names that templates know."""
    return {{"role": {role}, "content": message[{literal(tags.content)}]}}
{answer}'''


def _pictures(column: str | None) -> str:
    """Return what adds a row's pictures to a dictionary of its conversation."""
    return "" if column is None else f', "images": row.get({literal(column)})'


def _roles(roles: Mapping[str, str]) -> str:
    pairs = [f"{literal(word)}: {literal(role)}" for word, role in roles.items()]
    line = f"ROLES = {{{', '.join(pairs)}}}\n\n"
    many = "\n".join(["ROLES = {", *(f"    {pair}," for pair in pairs), "}\n\n"])
    return (line if len(line) <= WIDTH + 2 else many) if roles else ""


_TASK = "Below is an instruction that describes a task"
_COMPLETES = "Write a response that appropriately completes the request.\n\n"
WITH_INPUT = (
    f"{_TASK}, paired with an input that provides further context. {_COMPLETES}"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
WITHOUT_INPUT = f"{_TASK}. {_COMPLETES}### Instruction:\n{{instruction}}\n\n### Response:\n"


def alpaca_prompt(columns: Mapping[str, str] | None = None) -> Prompt:
    """Return Alpaca's prompt."""
    return Prompt(WITH_INPUT, WITHOUT_INPUT, **dict(columns or {}))


def alpaca_messages(prompt: Prompt, origin: str, systems: tuple[str, str] | None = None) -> str:
    """Write a file that makes a conversation of a row: the user has the prompt, the assistant the output."""
    constants, system = "", ""
    if systems is not None:
        names = ("SYSTEM_WITH_INPUT", "SYSTEM_WITHOUT_INPUT")
        constants = "".join(constant(name, text) for name, text in zip(names, systems, strict=True))
        system = " if given else ".join(names)
    return f'''"""Rows as conversations with {origin}: the prompt is the user's message."""

{constants}{_templates(prompt)}

def {FUNCTION}(row):
    """A row of `{prompt.instruction}`, `{prompt.input}` and `{prompt.output}`."""
    given = row.get({literal(str(prompt.input))})
    template = WITH_INPUT if given else WITHOUT_INPUT
    prompt = template.format(instruction=row[{literal(prompt.instruction)}], input=given)
    answer = row[{literal(prompt.output)}]
{_conversation("prompt", "answer", system)}'''


def paired(asked: str, answered: str, system: str | None = None) -> str:
    """Write a file that makes a conversation of two columns."""
    return f'''"""Rows of two columns as conversations of a question and its answer."""

{"" if system is None else constant("SYSTEM", system)}

def {FUNCTION}(row):
    """A row of `{asked}` and `{answered}`."""
{_conversation(f"row[{literal(asked)}]", f"row[{literal(answered)}]", "" if system is None else "SYSTEM")}'''


def spaced(columns: Sequence[str], answer: str) -> str:
    """Write NeMo AutoModel's prompt: the columns in sequence, each with a space after it, then the answer."""
    parts = ", ".join(f"row.get({literal(column)})" for column in columns)
    return f'''"""Rows of columns as a prompt and its completion."""


def {FUNCTION}(row):
    """A row whose columns follow each other, and `{docstring(answer)}`."""
    parts = [{parts}]
    prompt = "".join(f"{{part}} " for part in parts if part is not None)
    return {{"prompt": prompt, "completion": row[{literal(answer)}]}}
'''


def by_columns(
    system: str | None,
    columns: Mapping[str, str],
    ranking: bool,
    filled: Mapping[str, tuple[str, str]] | None = None,
    prefix: str = "",
    label: bool = False,
) -> str:
    """Read rows as ms-swift does: messages, or a question and its answer, by the names of the columns.

    Args:
        system: a system message for rows without one.
        columns: the new names of columns, by the source's own names.
        ranking: whether a row has a second answer, for preferences.
        filled: what replaces marks in rows with a `tag`, in Chinese and in English.
        prefix: removed from the beginning of answers, which are then stripped of white space.
        label: whether a row's `label` says that its answer is desirable.
    """
    fills = "".join(
        f"    {literal(k)}: ({literal(a)}, {literal(b)}),\n" for k, (a, b) in (filled or {}).items()
    )
    fill = ""
    if fills:
        fill = """\
        for mark, (chinese, english) in FILLED.items():
            word = chinese if row.get("tag") == "zh" else english
            query, response = query.replace(mark, word), response.replace(mark, word)
"""
        fills = f"FILLED = {{\n{fills}}}\n"
    if prefix:
        fill += f"""\
        if response.startswith({literal(prefix)}):
            response = response.removeprefix({literal(prefix)}).strip()
"""
    names = f"COLUMNS = {dict(columns)!r}\n".replace("'", '"') if columns else ""
    row = "{**row, **{new: row[old] for old, new in COLUMNS.items() if old in row}}"
    renamed = f"    row = {row}\n" if columns else ""
    default = "None" if system is None else literal(system)
    answer = '    return {"messages": messages}\n'
    if label:
        answer = (
            '    return {"prompt": messages[:-1], "completion": messages[-1:], "label": bool(row["label"])}\n'
        )
    if ranking:
        answer = """\
    rejected = first(row, "rejected_response", "rejected_messages", "rejected")
    if not isinstance(rejected, str):
        rejected = plain(rejected[-1])["content"]
    return {
        "prompt": messages[:-1],
        "chosen": messages[-1:],
        "rejected": [{"role": "assistant", "content": rejected}],
    }
"""
    return f'''"""Rows as conversations, told by their columns as ms-swift tells them."""

{names}{fills}SYSTEM = {default}
QUERIES = ("query", "prompt", "input", "instruction", "question", "problem")
RESPONSES = ("response", "answer", "output", "targets", "target", "answer_key", "answers", "solution")
ROLES = {{"human": "user", "gpt": "assistant", "bot": "assistant"}}


def {FUNCTION}(row):
    """A row of messages, of an instruction and its input, or of a query and its response."""
{renamed}    messages = first(row, "messages", "conversation", "conversations")
    if messages is None:
        query = first(row, *QUERIES)
        if "instruction" in row and "input" in row:
            given = (row["input"] or "").removeprefix("输入：")
            query = "\\n".join(part for part in (row["instruction"], given) if part)
        response = first(row, *RESPONSES, "text", "completion", "content")
{fill}        turns = [*(row.get("history") or []), (query, response)]
        roles = ("user", "assistant")
        messages = [
            {{"role": role, "content": text}}
            for turn in turns
            for role, text in zip(roles, turn, strict=False)
            if text is not None
        ]
    messages = [plain(message) for message in messages]
    system = first(row, "system", "system_prompt") or SYSTEM
    if system and messages[0]["role"] != "system":
        messages.insert(0, {{"role": "system", "content": system}})
{answer}

def first(row, *names):
    """The first of some columns that has a value."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def plain(message):
    """A message by the names that templates know."""
    role = first(message, "role", "from")
    return {{"role": ROLES.get(role, role), "content": first(message, "content", "value")}}
'''


def ranked(prompt: str, chosen: str, rejected: str, *, system: str = "", turns: bool = False) -> str:
    """Convert a question and two answers to messages."""
    named = ", ".join(f"`{docstring(column)}`" for column in (prompt, chosen, rejected))
    answer = '[1]["content"]' if turns else ""
    before = f"""\
    if row.get({literal(system)}):
        messages.insert(0, {{"role": "system", "content": row[{literal(system)}]}})
"""
    return f'''"""Rows of a question and two answers as messages."""


def {FUNCTION}(row):
    """A row of {named}; the second is preferred to the third."""
    messages = [{{"role": "user", "content": row[{literal(prompt)}]}}]
{before if system else ""}    return {{
        "prompt": messages,
        "chosen": [{{"role": "assistant", "content": row[{literal(chosen)}]{answer}}}],
        "rejected": [{{"role": "assistant", "content": row[{literal(rejected)}]{answer}}}],
    }}
'''


def labeled(asked: str, completion: str, label: str, system: str = "system") -> str:
    """Convert a question, its answer and its desirability to messages. The arguments are their columns."""
    named = ", ".join(f"`{docstring(column)}`" for column in (asked, completion, label))
    return f'''"""Rows of a question and an answer that is desirable or not, as messages."""


def {FUNCTION}(row):
    """A row of {named}."""
    messages = [{{"role": "user", "content": row[{literal(asked)}]}}]
    if row.get({literal(system)}):
        messages.insert(0, {{"role": "system", "content": row[{literal(system)}]}})
    return {{
        "prompt": messages,
        "completion": [{{"role": "assistant", "content": row[{literal(completion)}]}}],
        "label": row[{literal(label)}],
    }}
'''


def _conversation(user: str, assistant: str, system: str = "") -> str:
    first = f'            {{"role": "system", "content": {system}}},\n' if system else ""
    return f"""\
    return {{
        "messages": [
{first}            {{"role": "user", "content": {user}}},
            {{"role": "assistant", "content": {assistant}}},
        ]
    }}
"""


def _templates(prompt: Prompt) -> str:
    return constant("WITH_INPUT", prompt.with_input) + constant("WITHOUT_INPUT", prompt.without_input)


def constant(name: str, text: str) -> str:
    """Write an assignment of a text; a long text is split at its line breaks and spaces."""
    single = f"{name} = {literal(text)}\n"
    if len(single) <= WIDTH + 1:
        return single
    pieces: list[str] = []
    for line in text.splitlines(keepends=True):
        piece = ""
        for word in line.replace(" ", " \0").split("\0"):
            if piece and len(literal(piece + word)) > WIDTH - 4:
                pieces.append(piece)
                piece = ""
            piece += word
        pieces.append(piece)
    return "\n".join([f"{name} = (", *(f"    {literal(piece)}" for piece in pieces), ")\n"])


def literal(text: str) -> str:
    """Return a text as a Python literal in double quotes."""
    source = repr(text)
    if source.startswith('"'):
        return source
    return '"' + source[1:-1].replace("\\'", "'").replace('"', '\\"') + '"'
