"""Find the characters of a rendered conversation that carry loss.

A turn's targets are the text that the model has to write: everything after the generation prompt,
including the end-of-turn token. Their place is proven from the template's own renderings, in the first of
these ways that works:

1. the template marks them ({% generation %} ... {% endgeneration %});
2. prefixes: the conversation up to the turn, with the generation prompt, begins the conversation with
   the turn, which begins the whole rendering;
3. substitution, for templates that write a turn differently from its generation prompt (that strip
   earlier reasoning, or prompt with empty reasoning): the whole conversation, rendered again with
   another text in the turn's place, differs in one stretch, which is the turn's text, and a special
   token follows it. A turn that calls tools is more than its text: what it writes as the last turn is
   looked for where the whole conversation, rendered with another tool's name, begins to differ.

Otherwise the conversation is refused: a mask is never guessed. The text of a message of another role is
found by substitution, with the special token that follows. A message of weight 0 is not a target.

The renderings also show what the template does not write of a conversation. Each string of a conversation
is looked for: as it is, without white space around it, as JSON writes it, or line by line. This is linear
in the text. Only what is not found is rendered again, with another text in its place: if the rendering
stays the same, the template does not write it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

from .advice import NO_SYSTEM, TEXT_AND_CALLS
from .columns import is_text, stands, strings
from .messages import REASONING, parted, taught
from .picture_rows import MARK
from .template import ChatTemplate, Messages, Misplaced, Span, TemplateRefusal, Tools


class Inconsistent(ValueError):
    """The targets cannot be determined from the template's renderings."""

    kind = "inconsistent"


class Blank(ValueError):
    """The template writes nothing for a turn that carries loss."""

    kind = "masked"


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: special tokens included, as the tokenizer reads them.
        spans: half-open ranges of target characters, in order.
        substituted: whether a span was found by substitution.
        ended: whether each span ends in a special token.
        unused: conversation content that the text lacks: keys of messages, "tools", "ROLE messages".
        adapted: keys of `report.ADAPTED`: the changes to messages.
        texts: other keys of messages whose text it lacks.
    """

    text: str
    spans: tuple[Span, ...]
    substituted: bool = False
    ended: bool = True
    unused: tuple[str, ...] = ()
    adapted: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()


def after_answer(template: ChatTemplate | None) -> str:
    """Return the text that a template writes after the last answer, without white space around it; "" if it
    writes none, or refuses a conversation of one question."""
    marker = absent_word()
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": marker}]
    try:
        return "" if template is None else template.render(messages).rpartition(marker)[2].strip()
    except TemplateRefusal:
        return ""


class Renderer:
    """Render conversations with one template, and find the characters that carry loss.

    Args:
        template: compiled, with the tokenizer's special tokens as variables.
        special: from `special_tokens`.
        loss_on: "assistant", "last_assistant", "completion" or "all"; or roles of messages.
    """

    def __init__(
        self, template: ChatTemplate, special: tuple[str, ...], loss_on: str | Sequence[str]
    ) -> None:
        self._template = template
        self._special = special
        self._blank = re.compile(rf"(?:\s|{'|'.join(map(re.escape, special))})*")
        self._loss_on = loss_on

    def render(
        self, messages: Messages, tools: Tools = None, completion_start: int | None = None
    ) -> Rendered:
        """Return a conversation's text and targets.

        Args:
            tools: the template's variable.
            completion_start: index of the first message of the completion, which loss_on completion needs.

        Raises:
            TemplateRefusal: the template raises on it.
            Inconsistent: its targets cannot be determined.
            Blank: the template writes nothing for a turn that carries loss.
        """
        try:
            return self._rendered(messages, tools, completion_start)
        except TemplateRefusal as error:
            if messages[0]["role"] == "system" and self._takes(messages[1:], tools):
                raise TemplateRefusal(f"{error}; {NO_SYSTEM}") from error
            raise

    def _takes(self, messages: Messages, tools: Tools) -> bool:
        try:
            self._template.render(messages, tools)
        except TemplateRefusal:
            return False
        return True

    def chosen(self, messages: Messages, completion_start: int | None = None) -> list[int]:
        """Return the numbers of the messages that loss_on selects, ignoring their weights."""
        if self._loss_on in ("all", "completion"):
            return list(range((completion_start or 0) if self._loss_on == "completion" else 0, len(messages)))
        roles = ("assistant",) if isinstance(self._loss_on, str) else self._loss_on
        turns = [i for i, message in enumerate(messages) if message["role"] in roles]
        return turns[-1:] if self._loss_on == "last_assistant" else turns

    def last(self, messages: Messages, tools: Tools) -> Span:
        """Return the place of the last message, which is the assistant's, as `render` finds it.

        Raises:
            TemplateRefusal, Inconsistent
        """
        return self._turns(messages, tools, [len(messages) - 1]).spans[-1]

    def _rendered(self, messages: Messages, tools: Tools, completion_start: int | None) -> Rendered:
        adapted = self._adapted(messages)
        chosen = self.chosen(messages, completion_start)
        muted = [turn for turn in chosen if messages[turn].get("weight") == 0]
        stretches = 1  # the number of learned stretches
        if self._loss_on == "all":
            text = self._template.render(messages, tools)
            rendered = Rendered(text, ((0, len(text)),))
        elif self._loss_on == "completion":
            if completion_start is None:
                raise Inconsistent("it does not say where its completion begins")
            rendered = self._completion(messages, tools, completion_start)
        else:
            wanted = [turn for turn in chosen if turn not in muted]
            rendered, stretches = self._turns(messages, tools, wanted), len(wanted)
            muted = []
        unused, texts = unwritten(self._template, messages, tools, rendered.text)
        written = sum(not self._blank.fullmatch(rendered.text, *span) for span in rendered.spans)
        if written < min(len(rendered.spans), stretches):  # an end of sequence may be a stretch of its own
            held = f": it does not use {', '.join(unused)}" if unused else ""
            raise Blank(f"the chat template writes no part of an assistant's turn{held}")
        if muted:
            spans = _without(rendered, self._turns(messages, tools, muted).spans)
            rendered = replace(rendered, spans=tuple(spans))
        return replace(rendered, unused=unused, texts=texts, adapted=adapted)

    def _adapted(self, messages: Messages) -> tuple[str, ...]:
        """Return the changes that the template's form of tool calls makes to a conversation.

        Raises:
            Inconsistent: the template writes a message's text after its tool calls.
        """
        calling = [i for i, message in enumerate(messages) if message.get("tool_calls")]
        if not calling:
            return ()
        form = self._template.calls
        for i in calling if form.order == "after" else ():
            if messages[i]["content"].strip():
                raise Inconsistent(f"message {i} {TEXT_AND_CALLS} writes the text after the calls")
        return tuple(dict.fromkeys(name for i in calling for name in form.applied(messages[i])))

    def _turns(self, messages: Messages, tools: Tools, turns: list[int]) -> Rendered:
        """Return the spans of messages: assistant turns including their end, and texts of other roles."""
        answers = [turn for turn in turns if messages[turn]["role"] == "assistant"]
        others = [turn for turn in turns if turn not in answers]
        if self._template.marked and answers:
            rendered = self._from_marks(messages, tools, answers)
        else:
            rendered = self._from_prompts(messages, tools, answers)
        if not others:
            return rendered
        texts = [self._by_substitution(messages, tools, turn, rendered.text) for turn in others]
        return replace(rendered, spans=_apart(sorted([*rendered.spans, *texts])))

    def _from_prompts(self, messages: Messages, tools: Tools, turns: list[int]) -> Rendered:
        text = self._template.render(messages, tools)
        spans: list[Span] = []
        substituted = False
        for turn in turns:
            span = self._by_prefix(messages, tools, turn, text)
            if span is None:
                span, substituted = self._by_other_text(messages, tools, turn, text), True
            # If the message before it is the same turn, the token that follows its text begins this one.
            if spans and turn - 1 in turns and spans[-1][0] < span[0]:
                spans[-1] = (spans[-1][0], min(spans[-1][1], span[0]))
            spans.append(span)
        continued = {start for start, _ in spans}
        ended = all(end in continued or self._ends_turn(text[:end]) for _, end in spans)
        return Rendered(text, _apart(spans), substituted, ended)

    def _completion(self, messages: Messages, tools: Tools, start: int) -> Rendered:
        """Return everything after the prompt, where the generation prompt ends."""
        text = self._template.render(messages, tools)
        prompt = self._template.render(messages[:start], tools, add_generation_prompt=True)
        if text.startswith(prompt) and len(text) > len(prompt):
            return Rendered(text, ((len(prompt), len(text)),), ended=self._ends_turn(text.rstrip()))
        if start == len(messages) - 1 and messages[start]["role"] == "assistant":
            span = self._by_other_text(messages, tools, start, text)
            return Rendered(text, (span,), substituted=True)
        raise Inconsistent(
            "the prompt, rendered with the generation prompt, does not begin the whole rendering"
        )

    def _from_marks(self, messages: Messages, tools: Tools, turns: list[int]) -> Rendered:
        try:
            text, spans = self._template.render_marked(messages, tools)
        except Misplaced as error:
            raise Inconsistent(str(error)) from error
        marks = [(start, end) for start, end in spans if end > start]
        if not marks:
            raise Inconsistent("the template's generation markers enclose nothing")
        every = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if turns != every:
            if len(marks) != len(every):
                raise Inconsistent(
                    f"{len(every)} assistant turns, and {len(marks)} spans marked as generated"
                )
            marks = [mark for turn, mark in zip(every, marks, strict=True) if turn in turns]
        ended = all(self._ends_turn(text[:end].rstrip()) for _, end in marks)
        return Rendered(text, tuple(marks), ended=ended)

    def _by_prefix(self, messages: Messages, tools: Tools, turn: int, text: str) -> Span | None:
        try:
            prompt = self._template.render(messages[:turn], tools, add_generation_prompt=True)
            last = turn == len(messages) - 1
            whole = text if last else self._template.render(messages[: turn + 1], tools)
        except TemplateRefusal:  # some templates refuse to render a partial conversation
            return None
        if not (text.startswith(whole) and whole.startswith(prompt)):
            return None
        # White space after the end-of-turn token is written when generation has already stopped.
        written = whole.rstrip()
        end = len(written) if self._ends_turn(written) else len(whole)
        return (len(prompt), end) if end > len(prompt) else None

    def _by_other_text(self, messages: Messages, tools: Tools, turn: int, text: str) -> Span:
        find = self._by_other_name if messages[turn].get("tool_calls") else self._by_substitution
        return find(messages, tools, turn, text)

    def _by_substitution(self, messages: Messages, tools: Tools, turn: int, text: str) -> Span:
        message = messages[turn]
        is_answer, content = message["role"] == "assistant", message["content"]
        marker = _marker(text, messages)
        # For the assistant only the text: reasoning and other fields would be part of the turn, which would
        # not be found.
        other = {"role": message["role"], "content": marker} if is_answer else {**message, "content": marker}
        changed = [*messages[:turn], other, *messages[turn + 1 :]]
        try:
            rendered = self._template.render(changed, tools)
        except TemplateRefusal as error:
            raise Inconsistent(f"the template refuses another text in place of message {turn}") from error
        if rendered.count(marker) != 1:
            raise Inconsistent(f"the template writes message {turn} {rendered.count(marker)} times, not once")
        before, _, after = rendered.partition(marker)
        start, stop = len(before), len(text) - len(after)
        if not (text.startswith(before) and text.endswith(after) and start < stop):
            raise Inconsistent(
                f"the template's text around message {turn} depends on the message's text, and the "
                "turn does not begin with its generation prompt"
            )
        written = text[start:stop].strip()
        if not written or not any(written in form for form in (content, *_in_json(content))):
            raise Inconsistent(f"the template does not write message {turn} unchanged")
        rest = after.lstrip()
        token = next((token for token in self._special if rest.startswith(token)), None)
        if token is None and is_answer:
            raise Inconsistent(f"the template writes no end-of-turn token after message {turn}")
        return start, stop + (0 if token is None else len(after) - len(rest) + len(token))

    def _by_other_name(self, messages: Messages, tools: Tools, turn: int, text: str) -> Span:
        """Find a turn that calls tools, which the template writes with a prefix if it is the last turn.

        As the last turn it is header + call + end. In the whole it is call + end at the same place, which is
        where a rendering with another tool name begins to differ.
        """
        message = parted(messages[turn])[1]
        marker = _marker(text, messages)
        first, *calls = message["tool_calls"]
        renamed = {
            **message,
            "tool_calls": [{**first, "function": {**first["function"], "name": marker}}, *calls],
        }
        plain = {"role": "assistant", "content": marker}
        before = messages[:turn]
        try:
            last = self._template.render([*before, message], tools).rstrip()
            until = self._template.render([*before, renamed], tools).partition(marker)[0]
            whole = self._template.render([*before, renamed, *messages[turn + 1 :]], tools)
            prompt = self._template.render(before, tools, add_generation_prompt=True)
            header = self._template.render([*before, plain], tools).partition(marker)[0]
        except TemplateRefusal as error:
            raise Inconsistent(
                f"the template refuses message {turn}, which calls tools, without the others"
            ) from error
        place, rest = whole.partition(marker)[0], last[len(until) :]
        if last.startswith(until) and text.startswith(place + rest) and self._ends_turn(last):
            for begin in (prompt, header):
                written = until[len(begin) :]
                if until.startswith(begin) and place.endswith(written):
                    return len(place) - len(written), len(place) + len(rest)
        if message["content"].strip() and self._template.calls.order == "unknown":
            raise Inconsistent(f"message {turn} {TEXT_AND_CALLS} does not write both")
        raise Inconsistent(
            f"message {turn} calls tools, and does not begin with the template's generation prompt"
        )

    def _ends_turn(self, text: str) -> bool:
        return text.endswith(self._special)


def absent_word(*texts: str) -> str:
    """Return a word that occurs in none of some texts."""
    word = "substitute"
    while any(word in text for text in texts):
        word += "x"
    return word


def _marker(text: str, messages: Messages) -> str:
    return absent_word(text, *(message["content"] for message in messages))


def _in_json(content: str) -> tuple[str, str]:
    """Return a text as it appears within JSON, in which some templates write tool results."""
    return json.dumps(content)[1:-1], json.dumps(content, ensure_ascii=False)[1:-1]


def _apart(spans: Sequence[Span]) -> tuple[Span, ...]:
    if any(after[0] < before[1] for before, after in pairwise(spans)):
        raise Inconsistent("the template mixes the texts of messages")
    return tuple(spans)


def _without(rendered: Rendered, cut: Iterable[Span]) -> list[Span]:
    """Return the targets outside of some stretches; targets of only white space are dropped."""
    spans = list(rendered.spans)
    for begin, end in cut:
        spans = [part for s, e in spans for part in ((s, min(e, begin)), (max(s, end), e))]
    return [(start, end) for start, end in spans if rendered.text[start:end].strip()]


Place: TypeAlias = tuple[str | int, ...]

Changes: TypeAlias = dict[tuple["Place", str], str]
"""By a string's place and its text: the text to put there."""

MESSAGES, TOOLS = "messages", "tools"

MARKED = "reasoning"
"""The name of reasoning at the beginning of a content."""

THOUGHTS = {*REASONING, MARKED}

EARLIER = "reasoning of earlier turns"


@dataclass(frozen=True)
class Leaf:
    """A string of a conversation.

    Attributes:
        name: what a report calls it: a message's key, "tools" or "ROLE messages".
        path: its place in {"messages": [...], "tools": [...]}.
        text: the string, or a part of it.
        part: whether it is a part of the sample by its key; otherwise its key has no known meaning.
        sure: whether finding it in the rendering shows that it is written.
    """

    name: str
    path: Place
    text: str
    part: bool = True
    sure: bool = True


def unwritten(
    template: ChatTemplate, messages: Messages, tools: Tools, text: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what a rendering lacks: names of parts of the sample, and names of other text.

    Reasoning of earlier turns is other text if any reasoning is written: templates leave it out on purpose.

    Args:
        text: the conversation as the template renders it.
    """
    sample = {MESSAGES: messages, TOOLS: tools}

    def rendered(changes: Changes) -> str | None:
        changed = _changed(sample, (), changes)
        try:
            return template.render(changed[MESSAGES], changed[TOOLS])
        except TemplateRefusal:
            return None

    hidden: list[Leaf] = []
    seen: set[str] = set()
    place = 0
    for message in _leaves(messages):
        after = place
        for leaf in message:
            end = _end_in(leaf.text, text, place)
            if end is None or not leaf.sure:
                hidden.append(leaf)
            else:
                seen.add(leaf.name)
                after = max(after, end)
        place = after
    if tools:
        hidden += [leaf for leaf in _of_tools(tools) if _end_in(leaf.text, text, 0) is None]
    others: list[str] = []
    if THOUGHTS & seen and any(leaf.name in THOUGHTS for leaf in hidden):
        hidden, others = [leaf for leaf in hidden if leaf.name not in THOUGHTS], [EARLIER]
    missing = _missing(hidden, text, rendered) if hidden else []
    names = [leaf.name for leaf in missing if leaf.part]
    if tools and TOOLS not in names:
        with suppress(TemplateRefusal):
            names += [TOOLS] if template.render(messages, None) == text else []
    others += [leaf.name for leaf in missing if not leaf.part]
    return tuple(dict.fromkeys(names)), tuple(dict.fromkeys(others))


def _leaves(messages: Messages) -> Iterator[list[Leaf]]:
    """Yield the strings of each message."""
    for i, message in enumerate(messages):
        at, known = (MESSAGES, i), taught(message)
        out: list[Leaf] = []
        content = message["content"]
        if message["role"] == "assistant":
            thoughts, rest = parted({"content": content})
            out += [Leaf(MARKED, (*at, "content"), thought) for thought in thoughts]
            content = rest["content"]
        for key in message:
            value = message[key]
            if key == "content":
                name = f"{message['role']} messages"
                out += [Leaf(name, (*at, key), text) for text in content.split(MARK)]
            elif key == "tool_calls" and key in known:
                out += _of_calls(value, (*at, key))
            elif key in known or (key != "role" and any(map(is_text, strings(value)))):
                out += [Leaf(key, (*at, key, *path), leaf, key in known) for path, leaf in _walk(value)]
        yield [leaf for leaf in out if leaf.text.strip()]


def _of_calls(calls: Sequence[dict[str, Any]], at: Place) -> Iterator[Leaf]:
    """Yield the names and the arguments' strings of calls. A repeated name may stand for another call."""
    for n, call in enumerate(calls):
        function = call["function"]
        yield Leaf("tool_calls", (*at, n, "function", "name"), function["name"], sure=not n)
        for path, leaf in _walk(function.get("arguments")):
            yield Leaf("tool_calls", (*at, n, "function", "arguments", *path), leaf)


def _of_tools(tools: Sequence[dict[str, Any]]) -> Iterator[Leaf]:
    """Yield the names of tools and the texts of their schemas."""
    for n, tool in enumerate(tools):
        for path, leaf in _walk(tool):
            part = path in (("function", "name"), ("function", "description"))
            if part or path[-1] == "description":
                yield Leaf(TOOLS if part else "descriptions in tools", (TOOLS, n, *path), leaf, part)


def _walk(value: Any, path: Place = ()) -> Iterator[tuple[Place, str]]:
    """Yield the strings within a value, at every depth, with their places."""
    pending = [(path, value)]
    while pending:
        at, item = pending.pop()
        if isinstance(item, str):
            if item.strip():
                yield at, item
        elif isinstance(item, dict):
            pending += [((*at, key), inner) for key, inner in reversed(item.items())]
        elif isinstance(item, (list, tuple)):
            pending += [((*at, n), inner) for n, inner in reversed([*enumerate(item)])]


def _end_in(leaf: str, text: str, place: int) -> int | None:
    """Return where a string that stands in the text after a place ends; None if it does not stand there.

    Its lines may stand anywhere: then the place is returned.
    """
    leaf = leaf.strip()
    start = text.find(leaf, place)
    if start >= 0:
        return start + len(leaf)
    if '"' in leaf or "\\" in leaf or "\n" in leaf or not leaf.isascii():
        for form in (json.dumps(leaf)[1:-1], json.dumps(leaf, ensure_ascii=False)[1:-1]):
            start = text.find(form, place)
            if start >= 0:
                return start + len(form)
    return place if "\n" in leaf and stands(leaf, text) else None


def _missing(hidden: Sequence[Leaf], text: str, rendered: Callable[[Changes], str | None]) -> list[Leaf]:
    """Return the strings that a rendering does not depend on, or of which it lacks whole lines."""

    def same(leaves: Sequence[Leaf]) -> bool:
        return rendered({(leaf.path, leaf.text): marker for leaf in leaves}) == text

    marker = absent_word(text)
    marks = {n: f"{marker}{n}x" for n in range(len(hidden))}
    whole = rendered({(leaf.path, leaf.text): marks[n] for n, leaf in enumerate(hidden)})
    written = "" if whole is None else whole.lower()
    absent = [leaf for n, leaf in enumerate(hidden) if marks[n] not in written]
    missing = absent
    if absent and not same(absent):
        missing = [leaf for leaf in absent if same([leaf])]
    # The template writes these in another form, or in part.
    for leaf in (leaf for leaf in hidden if leaf.sure and leaf not in absent and "\n" in leaf.text):
        lines = [line for line in leaf.text.split("\n") if line.strip() and line.strip() not in text]
        if lines and rendered({(leaf.path, line): marker for line in lines}) == text:
            missing = [*missing, leaf]
    return missing


def _changed(value: Any, path: Place, changes: Changes) -> Any:
    """Return a copy of a value with other texts in some places."""
    if not any(place[: len(path)] == path for place, _ in changes):
        return value
    if isinstance(value, dict):
        return {key: _changed(item, (*path, key), changes) for key, item in value.items()}
    if isinstance(value, list):
        return [_changed(item, (*path, n), changes) for n, item in enumerate(value)]
    for (place, old), new in changes.items():
        if place == path:
            value = value.replace(old, new, 1)
    return value
