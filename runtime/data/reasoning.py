"""Apply `data.reasoning`: keep or drop the assistant's reasoning.

keep   each learned turn's reasoning is written and learned, or the conversation is refused
drop   reasoning is removed before the template renders the conversation
empty  as drop, and the last turn follows the generation prompt for a model with thinking disabled

Templates get the variables of vLLM and transformers: `enable_thinking`, which Qwen 3 and Gemma 4 read, and
`preserve_thinking`, with which some keep the reasoning of earlier turns.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from ..errors import UserError
from .formats import ParsedSample
from .masking import Inconsistent, Rendered, Renderer, absent_word
from .messages import REASONING, Messages, only_closes, parted, unbalanced
from .template import ChatTemplate

VARIABLES: dict[str, dict[str, bool]] = {
    "keep": {"enable_thinking": True, "preserve_thinking": True},
    "drop": {},
    "empty": {"enable_thinking": False},
}
"""The template's variables, by `data.reasoning`."""


class Reasoning:
    """Render conversations with their reasoning kept, dropped or empty.

    Args:
        mode: value of `data.reasoning`.
        source: the template's text.
        variables: of the template, in addition to those of the mode.

    Raises:
        UserError: the mode is "empty", and the template cannot disable thinking.
    """

    def __init__(self, mode: str, source: str, variables: dict[str, str]) -> None:
        if mode == "empty" and "enable_thinking" not in source:
            raise UserError(
                "data.reasoning is empty, and the chat template does not read enable_thinking",
                "set data.reasoning: drop, or give a template that reads it as data.chat_template",
            )
        self._mode = mode
        named = [name for name in REASONING if re.search(rf"\b{name}\b", source)]
        self._name = named[0] if named else None
        self.template = ChatTemplate(source, {**variables, **VARIABLES[mode]})

    def render(self, renderer: Renderer, sample: ParsedSample) -> Rendered:
        """Return a conversation's text and targets, as `Renderer.render` does.

        Args:
            renderer: one that uses `self.template`.

        Raises:
            Inconsistent: the template does not write learned reasoning, its text or its end.
        """
        parts = self._parts(sample)
        messages = self._messages(sample, parts)
        rendered = renderer.render(messages, sample.tools, sample.completion_start)
        assert sample.messages is not None
        if any(only_closes(sample.messages[i]["content"]) for i in parts):
            rendered = replace(rendered, adapted=(*rendered.adapted, "unopened"))
        if self._mode == "keep":
            for i in renderer.chosen(messages, sample.completion_start):
                thoughts = parts[i][0] if i in parts and messages[i].get("weight") != 0 else []
                if thoughts and not self._is_learned(
                    rendered, messages, sample.tools, i, thoughts[0].strip()
                ):
                    raise Inconsistent(f"the chat template leaves the reasoning of message {i} out")
        elif self._mode == "empty" and messages[-1]["role"] == "assistant":
            return self._opened(rendered, renderer, messages, sample.tools)
        return rendered

    def prepared(self, sample: ParsedSample) -> ParsedSample:
        """Return the sample with its reasoning where the template reads it, or without.

        Raises:
            Inconsistent: as `render`.
        """
        return replace(sample, messages=self._messages(sample, self._parts(sample)))

    def _parts(self, sample: ParsedSample) -> dict[int, tuple[list[Any], dict[str, Any]]]:
        """Return the reasoning of each assistant's message, and the message without it."""
        assert sample.messages is not None
        parts = {
            i: parted(message) for i, message in enumerate(sample.messages) if message["role"] == "assistant"
        }
        for i, (thoughts, rest) in parts.items():
            if any(not isinstance(thought, str) for thought in thoughts):
                raise Inconsistent(f"the reasoning of message {i} is not text")
            if len({thought.strip() for thought in thoughts}) > 1:
                raise Inconsistent(f"message {i} has two texts of reasoning")
            if (reason := unbalanced(rest["content"])) is not None:
                raise Inconsistent(f"message {i} {reason}")
        return parts

    def _messages(self, sample: ParsedSample, parts: dict[int, tuple[list[Any], dict[str, Any]]]) -> Messages:
        assert sample.messages is not None
        return [
            self._written(message, *parts[i]) if i in parts else message
            for i, message in enumerate(sample.messages)
        ]

    def _is_learned(self, rendered: Rendered, messages: Messages, tools: Any, i: int, thought: str) -> bool:
        """Return whether the targets contain the reasoning of a message, where another reasoning would be."""
        marker = absent_word(rendered.text, thought)
        message = messages[i]
        if self._name in message:
            message = {**message, self._name: marker}
        else:
            message = {**message, "content": message["content"].replace(thought, marker, 1)}
        place = self.template.render([*messages[:i], message, *messages[i + 1 :]], tools).find(marker)
        if place < 0:
            return False
        written = rendered.text[place:].lstrip()
        place = len(rendered.text) - len(written)
        return written.startswith(thought) and any(
            start <= place and place + len(thought) <= end for start, end in rendered.spans
        )

    def _written(self, message: dict[str, Any], thoughts: list[str], rest: dict[str, Any]) -> dict[str, Any]:
        """Return an assistant message in the form that the template reads."""
        if self._mode != "keep":
            return rest
        return {**rest, self._name: thoughts[0]} if thoughts and self._name else message

    def _opened(self, rendered: Rendered, renderer: Renderer, messages: Messages, tools: Any) -> Rendered:
        """Return the text with the no-thinking generation prompt before its last turn."""
        prompt = self.template.render(messages[:-1], tools, add_generation_prompt=True)
        text = rendered.text
        if text.startswith(prompt):
            return rendered
        at = renderer.last(messages, tools)[0]
        if not prompt.startswith(text[:at]):
            raise Inconsistent("the last turn does not begin with the generation prompt without thinking")
        more = len(prompt) - at
        spans = [(start + more * (start >= at), end + more * (end > at)) for start, end in rendered.spans]
        return replace(rendered, text=prompt + text[at:], spans=tuple(spans))
