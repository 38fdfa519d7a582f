"""Alpaca's prompts, and files for `data.transform` that make conversations of columns."""

from __future__ import annotations

from collections.abc import Mapping

from compiler.port.meaning.conversion import FUNCTION, Prompt, constant, literal

_TASK = "Below is an instruction that describes a task"
_COMPLETES = "Write a response that appropriately completes the request.\n\n"
WITH_INPUT = (
    f"{_TASK}, paired with an input that provides further context. {_COMPLETES}"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
WITHOUT_INPUT = f"{_TASK}. {_COMPLETES}### Instruction:\n{{instruction}}\n\n### Response:\n"


def prompt(columns: Mapping[str, str] | None = None) -> Prompt:
    """Alpaca's prompt.

    Args:
        columns: instruction, input and output to the source's own names.
    """
    return Prompt(WITH_INPUT, WITHOUT_INPUT, **dict(columns or {}))


def messages(made: Prompt, origin: str) -> str:
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


def pairs(asked: str, answered: str, system: str | None = None) -> str:
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
