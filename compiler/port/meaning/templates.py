"""Chat templates that the tools know by name, as `data.chat_template` or `model.tokenizer`.

Where a tool's template is the model's own, the tokenizer's is taken, or that of the chat-tuned model of the
same size. Others are written out as Jinja, with markers around what the tool trains on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from recipec.compiler.lowering.catalog import Model
from recipec.compiler.port.ledger import Ledger
from recipec.compiler.port.meaning.models import chat_sibling
from recipec.compiler.port.names import known, tokenizer_of


@dataclass(frozen=True)
class Template:
    """What a template's name means for a model.

    Attributes:
        sets: the recipe's values: {"model.tokenizer": id} where another tokenizer carries the template,
            {"data.chat_template": Jinja} for one that is written out, {} for the model's own tokenizer's.
        note: how its text differs from the tool's, "" where it is the same.
        last: whether something ends the whole, once for all turns.
        ends: what a written template's answers end with.
        known: False for a name that no template stands for here.
    """

    sets: dict[str, Any]
    note: str = ""
    last: bool = False
    ends: str = ""
    known: bool = True


UNKNOWN = Template({}, known=False)


@dataclass(frozen=True)
class Turns:
    """A template that writes turn after turn; {} stands for what a message says.

    Attributes:
        user, assistant, system: what is written of a message.
        opening: what the assistant's turn begins with; it is not trained on.
        prefix: what everything begins with. The tokenizer's own tokens stand between NULs in all of these.
        default_system: the system message of a conversation without one, "" for none.
        in_user: whether the system message is written into the first user message.
        thought: what opens and closes a thought, which each answer begins with in a reasoning template.
        learns_empty: whether an empty thought is trained on that the template has put before an answer.
        learns_opening: whether what the assistant's turn begins with is trained on too.
        final: what an answer that is the last message ends with; None where it ends as the others.
        learns_final: whether it is trained on.
        last: what the whole ends with.
        tokens: the tokenizers in which the marks are tokens; to others they are text. Empty where they are
            text to all.
    """

    user: str
    assistant: str
    opening: str = ""
    system: str = "{}"
    prefix: str = ""
    default_system: str = ""
    in_user: bool = False
    thought: tuple[str, str] | None = None
    learns_empty: bool = True
    learns_opening: bool = False
    final: str | None = None
    learns_final: bool = True
    last: str = ""
    tokens: tuple[str, ...] = ()


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of data/port_models.json, with what it has of the row that it is like."""
    row = dict(row)
    like = row.pop("like", None)
    return {**_row(known("llamafactory", "templates")[like]), **row} if like else row


def _turns(row: Mapping[str, Any]) -> Turns:
    return Turns(**{key: _value(value) for key, value in _row(row).items()})


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return re.sub(r"\{([be]os_token)\}", "\0\\1\0", value) if isinstance(value, str) else value


LLAMAFACTORY = {name: _turns(row) for name, row in known("llamafactory", "templates").items()}
"""LLaMA-Factory's templates of text, by name."""
SWIFT = {name: _turns(row) for name, row in known("swift", "templates").items()}
"""Those of ms-swift that are written out."""
AXOLOTL = {name: _turns(row) for name, row in known("axolotl", "templates").items()}
TORCHTUNE = {name: _turns(row) for name, row in known("torchtune", "tokenizers").items()}
"""What torchtune's tokenizers write around messages, with the prompt template that is their default."""
PLAIN = TORCHTUNE["gemma_tokenizer"]
"""Of a tokenizer of torchtune's that has no marks, or no prompt template."""

NOT_TOKENS = "its marks are no tokens of {title}, and are written as text, in several tokens each"


def own(model: Model | None) -> Template:
    """The template of the model's tokenizer, or of the chat-tuned model's where the base has none."""
    sibling = chat_sibling(model) if model is not None else None
    if sibling is None:
        return Template({})
    return Template(
        {"model.tokenizer": sibling}, f"the tokenizer of {sibling}, which has the template; same tokens"
    )


def say_own(ledger: Ledger, model: Model) -> None:
    """Sets what `own` has."""
    found = own(model)
    for path, value in found.sets.items():
        ledger.set(path, value, found.note)


def axolotl(name: str, model: Model | None, jinja: str | None = None) -> Template:
    """Axolotl's `chat_template`.

    Args:
        jinja: `chat_template_jinja`, text or a file, for the name "jinja".
    """
    fallback = name.removeprefix("tokenizer_default_fallback_")
    if fallback != name:
        tuned = model is None or model.chat is not False
        return Template({}) if tuned else axolotl(fallback, model)
    if name == "tokenizer_default":
        return Template({})
    if name == "jinja":
        return Template({"data.chat_template": jinja}) if jinja else UNKNOWN
    owners = known("axolotl", "own").get(name, ())
    if owners and (model is None or tokenizer_of(model) in owners):
        found = own(model)
        by = (
            f"the tokenizer of {sibling}"
            if (sibling := found.sets.get("model.tokenizer"))
            else "the model's own"
        )
        return Template(
            found.sets, f"{by}: the template that Axolotl's copy was taken from, and may be newer"
        )
    if (turns := AXOLOTL.get(name)) is not None:
        made = {"data.chat_template": written(turns, after="\n" if name == "chatml" else "")}
        return Template(made, _foreign(turns, model), ends=turns.assistant.partition("{}")[2])
    return UNKNOWN


def llamafactory(
    name: str | None, model: Model | None, thinking: bool = True, default_system: str | None = None
) -> Template:
    """LLaMA-Factory's `template`.

    Args:
        thinking: `enable_thinking`.
        default_system: in place of the template's own.
    """
    if name is None:
        return Template({})
    turns = LLAMAFACTORY.get(name)
    if turns is None:
        return UNKNOWN
    if default_system is not None:
        turns = replace(turns, default_system=default_system)
    made = {"data.chat_template": written(turns, thinking)}
    return Template(made, _foreign(turns, model), last=bool(turns.last))


def swift(name: str, model: Model | None) -> Template:
    """ms-swift's `template`."""
    turns = SWIFT.get(name)
    if turns is None:
        return UNKNOWN
    return Template({"data.chat_template": written(turns)}, _foreign(turns, model))


def _foreign(turns: Turns, model: Model | None) -> str:
    if model is None or not turns.tokens or tokenizer_of(model) in turns.tokens:
        return ""
    return NOT_TOKENS.format(title=model.title)


def written(turns: Turns, thinking: bool = True, after: str = "") -> str:
    """The template as Jinja, with generation markers around what is trained on.

    Args:
        thinking: whether an empty thought is trained on, or only stands before the answer.
        after: what follows an answer without being trained on.
    """
    out = [
        "{%- if messages[0].role == 'system' -%}",
        "{%- set system = messages[0].content -%}{%- set turns = messages[1:] -%}",
        "{%- else -%}",
        f"{{%- set system = {_quoted(turns.default_system)} -%}}{{%- set turns = messages -%}}",
        "{%- endif -%}",
    ]
    if turns.prefix:
        out.append(f"{{{{- {_expression(turns.prefix)} -}}}}")
    system = f"({_expression(turns.system, 'system')} if system else '')"
    if not turns.in_user:
        out.append(f"{{%- if system -%}}{{{{- {_expression(turns.system, 'system')} -}}}}{{%- endif -%}}")
    content = f"({system} if loop.first else '') + message.content" if turns.in_user else "message.content"
    opening = f"{{{{- {_expression(turns.opening)} -}}}}" if turns.opening else ""
    said = "answer" if turns.thought and not thinking else "message.content"
    answer = f"{{{{- {_expression(turns.assistant, said)} -}}}}"
    ending = f"{{{{- {_expression(after)} -}}}}" if after else ""
    if turns.final is not None:
        begins, _, ends = turns.assistant.partition("{}")
        more = f"{{%- if not loop.last -%}}{{{{- {_expression(ends)} -}}}}{{%- endif -%}}"
        answer = f"{{{{- {_expression(begins + '{}', said)} -}}}}{more}"
        final = f"{{{{- {_expression(turns.final)} -}}}}" if turns.final else ""
        final = f"{{%- if loop.last -%}}{final}{{%- endif -%}}"
        answer, ending = (answer + final, "") if turns.learns_final else (answer, final)
    inside, outside = (_thought(turns.thought, thinking), "") if turns.thought else ("", "")
    if not (thinking and turns.learns_empty):
        inside, outside = outside, inside
    out += [
        "{%- for message in turns -%}",
        "{%- if message.role == 'user' -%}",
        f"{{{{- {_expression(turns.user, f'({content})' if turns.in_user else content)} -}}}}",
        "{%- elif message.role == 'assistant' and not message.tool_calls -%}",
        "" if turns.learns_opening else f"{opening}{outside}",
        f"{{%- generation -%}}{opening if turns.learns_opening else ''}{inside}{answer}"
        f"{{%- endgeneration -%}}{ending}",
        "{%- else -%}",
        "{{- raise_exception('this template writes no tools') -}}",
        "{%- endif -%}",
        "{%- endfor -%}",
    ]
    if opening:
        out.append(f"{{%- if add_generation_prompt -%}}{opening}{{%- endif -%}}")
    if turns.last:
        end = f"{{{{- {_expression(turns.last)} -}}}}"
        out.append(
            "{%- if not add_generation_prompt -%}{%- generation -%}"
            + end
            + "{%- endgeneration -%}{%- endif -%}"
        )
    return "\n".join(line for line in out if line) + "\n"


def _thought(thought: tuple[str, str], thinking: bool) -> str:
    """An empty thought before an answer that has none; without thinking, in place of the one that it has."""
    first, second = (_quoted(part.strip()) for part in thought)
    empty = f"{{{{- {_quoted(thought[0] + thought[1])} -}}}}"
    if thinking:
        without = f"{first} not in message.content and {second} not in message.content"
        return f"{{%- if {without} -%}}{empty}{{%- endif -%}}"
    after = f"message.content.split({_quoted(thought[1])})[-1].lstrip('\\n')"
    within = f"{_quoted(thought[0])} in message.content and {_quoted(thought[1])} in message.content"
    return f"{{%- set answer = {after} if {within} else message.content -%}}{empty}"


def _expression(text: str, content: str = "") -> str:
    """Jinja that gives a text in which {} stands for `content`."""
    out: list[str] = []
    before, _, after = text.partition("{}") if content else (text, "", "")
    for index, piece in enumerate((before, after)):
        if index and content:
            out.append(content)
        for part_index, part in enumerate(piece.split("\0")):
            if part:
                out.append(part if part_index % 2 else _quoted(part))
    return " + ".join(out)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"
