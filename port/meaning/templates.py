"""The tools' named chat templates, as `data.chat_template` or `model.tokenizer`.

If a tool's template is the model's own, the recipe uses the model's tokenizer, or the tokenizer of the
chat-tuned model of the same size. Other templates are written out as Jinja, with markers around the text that
the tool trains on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from recipec.compiler.catalog import Model
from recipec.port.engine import Says
from recipec.port.keys import Keys
from recipec.port.meaning.model_names import chat_sibling
from recipec.port.tool_names import known, tokenizer_of, written_by


@dataclass(frozen=True)
class Template:
    """The meaning of a template's name for a model.

    Attributes:
        sets: the recipe's values: {"model.tokenizer": id} if another tokenizer has the template,
            {"data.chat_template": Jinja} if it is written out, {} if the model's own tokenizer has it.
        note: how its text differs from the tool's, "" if it does not; for an unknown name, the reason.
        last: whether a text follows once after all turns.
        forgets: as in Turns.
        ends: the text after each answer of a written template.
        known: False for a name without a template here.
    """

    sets: dict[str, Any]
    note: str = ""
    last: bool = False
    forgets: bool = False
    ends: str = ""
    known: bool = True


UNKNOWN = Template({}, known=False)


def unknown(whose: str, name: Any, template: Template) -> str:
    """Return the message for an unknown template, with its owner and the reason."""
    return f"recipec cannot write out {whose} `{name}`" + (f": {template.note}" if template.note else "")


@dataclass(frozen=True)
class Turns:
    """A template that writes one turn after another. {} stands for a message's content.

    The tokenizer's own tokens stand between NULs in all texts.

    Attributes:
        user, assistant, system: the text of a message; "" if a system message is refused.
        opening: the beginning of the assistant's turn; it is not trained on.
        generation: the same where an answer is to be generated; None if equal.
        prefix: the beginning of the whole text.
        default_system: the system message of a conversation without one, "" for none.
        always_told: whether a conversation without a system message gets an empty one.
        in_user: whether the system message is written into the first user message.
        adds_bos: whether the tokenizer's usual beginning of texts precedes everything.
        thought: the opening and closing marks of the thought that begins each answer in a reasoning template.
        learns_empty: whether an empty thought that the template adds before an answer is trained on.
        forgets: whether earlier answers lose their thoughts if only the last answer is trained on.
        last_alone: whether only the last round's answers have thoughts, including empty ones.
        learns_opening: whether the beginning of the assistant's turn is trained on too.
        final: the end of an answer that is the last message; None if it ends like the others.
        learns_final: whether that end is trained on.
        after: the text after each answer; it is not trained on.
        between: the same if another message follows.
        last: the end of the whole text, which is trained on.
        trims: the roles whose messages are stripped of white space.
    """

    user: str
    assistant: str
    opening: str = ""
    generation: str | None = None
    system: str = "{}"
    prefix: str = ""
    default_system: str = ""
    always_told: bool = False
    in_user: bool = False
    adds_bos: bool = False
    thought: tuple[str, str] | None = None
    learns_empty: bool = True
    forgets: bool = False
    last_alone: bool = False
    learns_opening: bool = False
    final: str | None = None
    learns_final: bool = True
    after: str = ""
    between: str = ""
    last: str = ""
    trims: tuple[str, ...] = ()


def turns_of(row: Mapping[str, Any]) -> Turns:
    """Make Turns from a row of data/chat_templates.json."""
    return Turns(**{key: _value(value) for key, value in row.items()})


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return re.sub(r"\{([be]os_token)\}", "\0\\1\0", value) if isinstance(value, str) else value


def named(tool: str) -> dict[str, Turns]:
    """Return a tool's templates that write one turn after another, by name."""
    return {name: turns_of(row) for name, row in written_by(tool).items() if not isinstance(row, str)}


LLAMAFACTORY = named("llamafactory")


def _torchtune(row: Mapping[str, Any]) -> Turns:
    """Make Turns from a tokenizer's row of data/models.json, and LLaMA-Factory's template `like`."""
    changes = {key: value for key, value in row.items() if key != "like"}
    return turns_of({**written_by("llamafactory").get(str(row.get("like")), {}), **changes})


TORCHTUNE = {name: _torchtune(row) for name, row in known("torchtune", "tokenizers").items()}
"""The text that torchtune's tokenizers write around messages, with their default prompt template."""
PLAIN = TORCHTUNE["gemma_tokenizer"]
"""The turns of a torchtune tokenizer without marks, or without a prompt template."""

PIECES = "recipec tokenizes each turn with its context: other tokens if an answer begins with white space"
NOT_TOKENS = "its markers are not tokens of {title}, and recipec writes them as text, in several tokens each"


TURNS = {
    "<|im_end|>": "<|im_start|>",
    "<|eot_id|>": "<|start_header_id|>",
    "<|eot|>": "<|header_start|>",
    "<end_of_turn>": "<start_of_turn>",
    "<turn|>": "<|turn>",
    "<|END_OF_TURN_TOKEN|>": "<|START_OF_TURN_TOKEN|>",
}
"""The mark that begins a turn, by the one that ends it: a tokenizer has both as tokens, or neither."""


def missing_end(text: str, model: Model | None, added: str | Iterable[str]) -> str | None:
    """Return the mark at the beginning of a text that ends a turn and that is no token of the model; None if
    there is none.

    Args:
        text: what follows an answer.
        added: new tokens, or a text that names them.
    """
    mark = next((end for end in TURNS if text.startswith(end)), None)
    if mark is None or model is None or mark in added:
        return None
    return None if tokenizer_of(model) in known("marks").get(TURNS[mark], ()) else mark


def spelled(mark: str, model: Model, tool: str) -> str:
    """Return the message about a mark that is a token for the tool, and a text of several tokens here."""
    return (
        f"{tool} makes `{mark}`, which ends an answer, a token of {model.title}; recipec would write it in "
        "several tokens, at which no server stops"
    )


def own(model: Model | None) -> Template:
    """Return the template of the model's tokenizer, or of the chat-tuned model's if the base has none."""
    sibling = chat_sibling(model) if model is not None else None
    if sibling is None:
        return Template({})
    return Template(
        {"model.tokenizer": sibling},
        f"recipec uses the tokenizer of {sibling}, which has the template and the same tokens",
    )


def say_own(keys: Keys, model: Model) -> Says:
    """Set the values of `own`."""
    template = own(model)
    for path, value in template.sets.items():
        yield keys.sets(path, value, template.note)


def axolotl(name: str, model: Model | None, jinja: str | None = None) -> Template:
    """Return the template for Axolotl's `chat_template`."""
    fallback = name.removeprefix("tokenizer_default_fallback_")
    if fallback != name:
        tuned = model is None or model.chat is not False
        return Template({}) if tuned else axolotl(fallback, model)
    if name == "tokenizer_default":
        return Template({})
    if name == "jinja":
        return Template({"data.chat_template": jinja}) if jinja else UNKNOWN
    return _own("Axolotl", name, model) or of("axolotl", name, model)


def _own(tool: str, name: str, model: Model | None) -> Template | None:
    """Return the model's own template if the tool's template of the name writes the same; None otherwise."""
    ids = known(tool.lower(), "own").get(name)
    if ids is None or (model is not None and not re.fullmatch(ids, model.id)):
        return None
    template = own(model)
    sibling = template.sets.get("model.tokenizer")
    by = f"the tokenizer of {sibling}" if sibling else "the model's own"
    return Template(template.sets, f"{by}: {tool}'s copy comes from this template, which may be newer")


def unsloth(name: str, model: Model | None) -> Template:
    """Return the template for the name given to Unsloth's `get_chat_template`."""
    if template := _own("Unsloth", name, model):
        return template
    row = written_by("unsloth").get(name, "")
    if isinstance(row, str):
        return replace(UNKNOWN, note=row)
    # What is trained on ends with the mark, the eos_token of Unsloth's tokenizer.
    answer = turns_of(row).assistant
    ends = len(answer.rstrip())
    return of("unsloth", name, model, {"assistant": answer[:ends], "after": answer[ends:]})


def of(tool: str, name: str | None, model: Model | None, changes: Mapping[str, Any] = {}) -> Template:
    """Return a tool's template by its name, written out. An unknown template's note has the reason."""
    row = written_by(tool).get(name or "", "")
    if isinstance(row, str):
        return replace(UNKNOWN, note=row)
    turns = replace(turns_of(row), **changes)
    if turns.adds_bos and (model is None or tokenizer_of(model) in known("adds_bos")):
        turns = replace(turns, prefix=f"\0bos_token\0{turns.prefix}")
    sets = {"data.chat_template": written(turns)}
    ends = turns.assistant.partition("{}")[2]
    note = _foreign(turns, model)
    return Template(sets, note, last=bool(turns.last), forgets=turns.forgets, ends=ends)


def llamafactory(
    name: str | None, model: Model | None, thinking: bool = True, default_system: str | None = None
) -> Template:
    """Return the template for LLaMA-Factory's `template`."""
    if name is None:
        return Template({})
    turns = LLAMAFACTORY.get(name)
    if turns is None:
        return replace(UNKNOWN, note=written_by("llamafactory").get(name, ""))
    if default_system is not None:
        turns = replace(turns, default_system=default_system)
    sets = {"data.chat_template": written(turns, thinking)}
    ends = turns.assistant.partition("{}")[2]
    return Template(sets, _foreign(turns, model), last=bool(turns.last), ends=ends)


def _foreign(turns: Turns, model: Model | None) -> str:
    text = "".join((turns.user, turns.opening, turns.assistant, turns.prefix))
    owners = [owned for mark, owned in known("marks").items() if mark in text]
    if model is None or not owners or all(tokenizer_of(model) in owned for owned in owners):
        return ""
    return NOT_TOKENS.format(title=model.title)


def written(turns: Turns, thinking: bool = True) -> str:
    """Write the template as Jinja, with generation markers around the text that is trained on."""
    says = {
        role: f"message.content{' | trim' if role in turns.trims else ''}" for role in ("user", "assistant")
    }
    first = f"messages[0].content{' | trim' if 'system' in turns.trims else ''}"
    out = [
        "{%- if messages[0].role == 'system' -%}",
        f"{{%- set system = {first} -%}}{{%- set turns = messages[1:] -%}}"
        if turns.system
        else "{{- raise_exception('this template writes no system message') -}}",
        "{%- else -%}",
        f"{{%- set system = {_quoted(turns.default_system)} -%}}{{%- set turns = messages -%}}",
        "{%- endif -%}",
    ]
    if turns.prefix:
        out.append(f"{{{{- {_expression(turns.prefix)} -}}}}")
    system = f"({_expression(turns.system, 'system')} if system else '')"
    if turns.system and not turns.in_user:
        system_turn = f"{{{{- {_expression(turns.system, 'system')} -}}}}"
        out.append(system_turn if turns.always_told else f"{{%- if system -%}}{system_turn}{{%- endif -%}}")
    asked = says["user"]
    if turns.in_user:
        asked = f"(({system} if loop.first else '') + {f'({asked})' if '|' in asked else asked})"
    opening = f"{{{{- {_expression(turns.opening)} -}}}}" if turns.opening else ""
    rewritten = turns.last_alone or (turns.thought and not thinking)
    answer = "answer" if rewritten else says["assistant"]
    answer_turn = f"{{{{- {_expression(turns.assistant, answer)} -}}}}"
    tail = f"{{{{- {_expression(turns.after)} -}}}}" if turns.after else ""
    if turns.between:
        tail += f"{{%- if not loop.last -%}}{{{{- {_expression(turns.between)} -}}}}{{%- endif -%}}"
    if turns.final is not None:
        begins, _, ends = turns.assistant.partition("{}")
        more = f"{{%- if not loop.last -%}}{{{{- {_expression(ends)} -}}}}{{%- endif -%}}"
        answer_turn = f"{{{{- {_expression(begins + '{}', answer)} -}}}}{more}"
        final = f"{{{{- {_expression(turns.final)} -}}}}" if turns.final else ""
        final = f"{{%- if loop.last -%}}{final}{{%- endif -%}}"
        answer_turn, tail = (answer_turn + final, tail) if turns.learns_final else (answer_turn, final + tail)
    thought = _thought(turns.thought, thinking) if turns.thought else ""
    if turns.last_alone:
        end = _quoted(turns.thought[1].strip() if turns.thought else "</think>")
        earlier = f"message.content.split({end})[-1] | trim"
        thought = (
            f"{{%- set answer = {says['assistant']} if loop.last else {earlier} -%}}"
            f"{{%- if loop.last -%}}{thought}{{%- endif -%}}"
        )
    inside, outside = thought, ""
    if not (thinking and turns.learns_empty):
        inside, outside = outside, inside
    before, learned = ("", opening) if turns.learns_opening else (opening, "")
    out += [
        "{%- for message in turns -%}",
        "{%- if message.role == 'user' -%}",
        f"{{{{- {_expression(turns.user, asked)} -}}}}",
        "{%- elif message.role == 'assistant' and not message.tool_calls -%}",
        f"{before}{outside}",
        f"{{%- generation -%}}{learned}{inside}{answer_turn}{{%- endgeneration -%}}{tail}",
        "{%- else -%}",
        "{{- raise_exception('this template writes no tools') -}}",
        "{%- endif -%}",
        "{%- endfor -%}",
    ]
    asks = turns.opening if turns.generation is None else turns.generation
    if asks:
        out.append(f"{{%- if add_generation_prompt -%}}{{{{- {_expression(asks)} -}}}}{{%- endif -%}}")
    if turns.last:
        end = f"{{{{- {_expression(turns.last)} -}}}}"
        out.append(
            "{%- if not add_generation_prompt -%}{%- generation -%}"
            + end
            + "{%- endgeneration -%}{%- endif -%}"
        )
    return "\n".join(line for line in out if line) + "\n"


USER, NEXT = "{%- if message.role == 'user' -%}", "{%- elif message.role == 'assistant'"
"""What `written` puts around the turns of a user."""
SHOWN = """\
{%- macro shown(content) -%}
{%- if content is string -%}{{- content -}}{%- else -%}
{%- for part in content -%}{{- PLACE if part.type == 'image' else part.text -}}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
"""
"""A macro for a content that may have parts."""


def with_places(template: str, place: str) -> str | None:
    """Return a template that `written` has made, with the places of pictures in the user's turns; None for
    another template.

    Args:
        place: what the model's own template writes for a picture.
    """
    before, user, rest = template.partition(USER)
    turn, following, after = rest.partition(NEXT)
    if not following or "message.content" not in turn:
        return None
    turn = turn.replace("message.content", "shown(message.content)")
    return SHOWN.replace("PLACE", _quoted(place)) + before + user + turn + following + after


def _thought(thought: tuple[str, str], thinking: bool) -> str:
    """Write an empty thought before an answer that has none, or in place of any thought if not `thinking`."""
    first, second = (_quoted(part.strip()) for part in thought)
    empty = f"{{{{- {_quoted(thought[0] + thought[1])} -}}}}"
    if thinking:
        without = f"{first} not in message.content and {second} not in message.content"
        return f"{{%- if {without} -%}}{empty}{{%- endif -%}}"
    after = f"message.content.split({_quoted(thought[1])})[-1].lstrip('\\n')"
    within = f"{_quoted(thought[0])} in message.content and {_quoted(thought[1])} in message.content"
    return f"{{%- set answer = {after} if {within} else message.content -%}}{empty}"


def _expression(text: str, content: str = "") -> str:
    """Return Jinja for a text in which {} stands for `content`."""
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
