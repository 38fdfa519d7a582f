"""Chat with a trained model, with its chat template; tokens are printed as they arrive."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from recipec.compiler.errors import ArtifactError
from recipec.compiler.terminal import doing, note
from recipec.compiler.trained.chat_engines import Options, load_engine
from recipec.compiler.trained.model_folder import open_trained, template_variables
from recipec.runtime.errors import first_line

Message = dict[str, str]
RESET, EXIT = "/reset", "/exit"
HELP = f"{RESET} begins a new conversation; --chat-template FILE gives another template"


class Talk:
    """A conversation with a model.

    Attributes:
        messages: so far.
        tokenizer: of the model.

    Raises:
        ArtifactError: when packages are missing, or the model cannot be loaded.
    """

    def __init__(self, folder: Path, options: Options, say: Callable[[str], None]) -> None:
        trained = open_trained(folder)
        self.options, self._say = options, say
        self._variables = template_variables(trained.folder)
        with doing(f"loading {trained.folder}"):
            self._engine = load_engine(trained, options)
        self.tokenizer = self._engine.tokenizer
        if self.tokenizer.chat_template is None:
            raise ArtifactError(
                f"{trained.folder} has no chat template", "give one with --chat-template FILE"
            )
        note(f"{self._engine.title} answers")
        self.messages: list[Message] = []
        self.reset()

    def reset(self) -> None:
        """Start a new conversation."""
        self.messages = [{"role": "system", "content": self.options.system}] if self.options.system else []

    def answer(self, text: str) -> str:
        """Return the model's answer, and pass its pieces to `say` as they arrive.

        Raises:
            ArtifactError: when the template rejects the conversation, or the model has no position for an
                answer. The conversation is then left as it was before.
        """
        from jinja2 import TemplateError

        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            inputs = self.tokenizer.apply_chat_template(
                asked, add_generation_prompt=True, return_dict=True, **self._variables
            )
        except (TemplateError, TypeError) as error:
            raise ArtifactError(f"the chat template refuses this: {first_line(error)[:200]}", HELP) from None
        prompt, most, positions = list(inputs["input_ids"]), self.options.max_tokens, self._engine.positions
        if positions is not None:
            if len(prompt) >= positions:
                raise ArtifactError(
                    f"the conversation has {len(prompt):,} tokens, and the model has {positions:,} positions "
                    "for it and the answer",
                    f"{RESET} begins a new conversation",
                )
            most = min(most, positions - len(prompt))
        tokens = self._engine.answer(prompt, most, self._say)
        answer_text = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
        self.messages = [*asked, {"role": "assistant", "content": answer_text}]
        return answer_text


def converse(talk: Talk) -> None:
    """Answer each line that is typed or piped, until Ctrl-D. RESET starts anew, EXIT ends the chat.

    Raises:
        ArtifactError: when a piped line cannot be answered. For a typed line, the error is only shown.
    """
    interactive = sys.stdin.isatty()
    for line in _lines("> " if interactive else ""):
        if line.strip() == EXIT:
            return
        if line.strip() == RESET:
            talk.reset()
            note("a new conversation")
        elif line.strip():
            try:
                talk.answer(line)
            except KeyboardInterrupt:
                if not interactive:
                    raise
                note("\nthe answer was stopped and discarded")
            except ArtifactError as error:
                if not interactive:
                    raise
                note(f"error: {error}")


def _lines(prompt: str) -> Iterator[str]:
    if prompt:
        import readline  # noqa: F401 (edits what `input` reads)
    while True:
        try:
            yield input(prompt)
        except EOFError:
            return
