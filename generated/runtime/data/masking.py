"""Which characters of a rendered conversation carry loss.

A turn's targets are what the model would have to write: everything after the generation prompt, up to
and with the end-of-turn token. Where they lie is proven from the template's own renderings, in the
first of these ways that holds:

1. the template marks them ({% generation %} ... {% endgeneration %});
2. prefixes: the conversation up to the turn, with the generation prompt, begins the conversation with
   the turn, which begins the whole rendering;
3. substitution, for templates that write a turn differently from its generation prompt (that strip
   earlier reasoning, or prompt with an empty one): the whole conversation, rendered once more with
   another text in the turn's place, differs in one stretch, which is the turn's text, and a special
   token follows it.

Otherwise the conversation is refused: a mask is never guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from runtime.errors import UserError

Messages = list[dict[str, Any]]
Span = tuple[int, int]

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Refused(ValueError):
    """The template does not accept the conversation."""


class Inconsistent(ValueError):
    """The targets cannot be told from the template's renderings."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: special tokens included, as the tokenizer reads them.
        spans: half-open ranges of characters that are targets, in order.
        substituted: whether a span was found by substitution.
        ended: whether each span ends in a special token.
    """

    text: str
    spans: tuple[Span, ...]
    substituted: bool = False
    ended: bool = True


class Renderer:
    """Renders conversations with one template and finds what carries loss.

    Args:
        tokenizer: gives the template its bos_token and so on, and says which tokens are special.
        template: Jinja text.
        loss_on: "assistant", "last_assistant" or "all".

    Raises:
        UserError: the template is not valid Jinja, or `loss_on` is not one of the three.
    """

    def __init__(self, tokenizer: Any, template: str, loss_on: str) -> None:
        from jinja2 import TemplateSyntaxError

        if loss_on not in ("assistant", "last_assistant", "all"):
            raise UserError(f"data.loss_on is {loss_on!r}", "it is assistant, last_assistant or all")
        self._template = template
        self._loss_on = loss_on
        self._variables = dict(tokenizer.special_tokens_map)
        self._special = tuple(
            sorted(
                {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
                | set(tokenizer.all_special_tokens),
                key=lambda token: (-len(token), token),
            )
        )
        self._marked = GENERATION.search(template) is not None
        try:
            self._render([{"role": "user", "content": "a"}])
        except TemplateSyntaxError as error:
            raise UserError(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}",
                "data.chat_template takes what tokenizer_config.json has as chat_template",
            ) from error
        except Exception:
            # It may rightly refuse this conversation; each real one gets its own answer.
            pass

    def render(self, messages: Messages) -> Rendered:
        """A conversation's text and targets.

        Raises:
            Refused: the template raises on it.
            Inconsistent: its targets cannot be told.
        """
        try:
            text, marks = self._render(messages, mark=True)
        except Exception as error:  # a template is a program: it may raise anything
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise Refused(f"the chat template refuses it: {reason}") from error
        if self._loss_on == "all":
            return Rendered(text, ((0, len(text)),), ended=True)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if self._marked:
            return self._from_marks(text, marks, len(turns))
        if self._loss_on == "last_assistant":
            turns = turns[-1:]
        spans: list[Span] = []
        substituted = False
        for turn in turns:
            span = self._by_prefix(messages, turn, text)
            if span is None:
                span = self._by_substitution(messages, turn, text)
                substituted = True
            if spans and span[0] < spans[-1][1]:
                raise Inconsistent(f"the template writes messages {turn} and before into one another")
            spans.append(span)
        return Rendered(text, tuple(spans), substituted, all(self._ends_turn(text[:end]) for _, end in spans))

    def _from_marks(self, text: str, marks: list[Span], turns: int) -> Rendered:
        marks = [(start, end) for start, end in marks if end > start]
        if not marks:
            raise Inconsistent("the template's generation markers enclose nothing")
        if self._loss_on == "last_assistant":
            if len(marks) != turns:
                raise Inconsistent(f"{turns} assistant turns, and {len(marks)} stretches marked as generated")
            marks = marks[-1:]
        ended = all(self._ends_turn(text[:end].rstrip()) for _, end in marks)
        return Rendered(text, tuple(marks), ended=ended)

    def _by_prefix(self, messages: Messages, turn: int, text: str) -> Span | None:
        try:
            prompt, _ = self._render(messages[:turn], add_generation_prompt=True)
            whole, _ = self._render(messages[: turn + 1])
        except Exception:  # some templates refuse to render a part of a conversation
            return None
        if not (text.startswith(whole) and whole.startswith(prompt)):
            return None
        # White space after the end-of-turn token comes when generation has stopped already.
        written = whole.rstrip()
        end = len(written) if self._ends_turn(written) else len(whole)
        return (len(prompt), end) if end > len(prompt) else None

    def _by_substitution(self, messages: Messages, turn: int, text: str) -> Span:
        content = messages[turn]["content"]
        marker = "substitute"
        while marker in text or any(marker in message["content"] for message in messages):
            marker += "x"
        changed = [*messages[:turn], {**messages[turn], "content": marker}, *messages[turn + 1 :]]
        try:
            other, _ = self._render(changed)
        except Exception as error:
            raise Inconsistent(f"the template refuses another text in message {turn}'s place") from error
        if other.count(marker) != 1:
            raise Inconsistent(f"the template writes message {turn} {other.count(marker)} times, not once")
        before, _, after = other.partition(marker)
        start, stop = len(before), len(text) - len(after)
        if not (text.startswith(before) and text.endswith(after) and start < stop):
            raise Inconsistent(
                f"the template's text around message {turn} depends on what the message says, and its "
                "generation prompt is not how it begins the turn"
            )
        written = text[start:stop].strip()
        if not written or written not in content:
            raise Inconsistent(f"the template does not write message {turn} as it stands")
        rest = after.lstrip()
        token = next((token for token in self._special if rest.startswith(token)), None)
        if token is None:
            raise Inconsistent(f"the template writes no end-of-turn token after message {turn}")
        return start, stop + len(after) - len(rest) + len(token)

    def _ends_turn(self, text: str) -> bool:
        return text.endswith(self._special)

    def _render(
        self, messages: Messages, add_generation_prompt: bool = False, mark: bool = False
    ) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        mark = mark and self._marked
        rendered, marks = render_jinja_template(
            conversations=[messages],
            chat_template=self._template,
            add_generation_prompt=add_generation_prompt,
            return_assistant_tokens_mask=mark,
            **self._variables,
        )
        return rendered[0], [(int(start), int(end)) for start, end in marks[0]] if mark else []
