"""Chat with a trained model in transformers, with its chat template; tokens are printed as they arrive."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipec.compiler.errors import ArtifactError
from recipec.compiler.packages import require_packages
from recipec.compiler.pages.numbers import gb_number
from recipec.compiler.terminal import doing, note
from recipec.compiler.trained.model_folder import Trained, open_trained, template_variables
from recipec.runtime.data.stops import GENERATION
from recipec.runtime.errors import first_line
from recipec.runtime.process_memory import available_memory

Message = dict[str, str]
RESET, EXIT = "/reset", "/exit"
HELP = f"{RESET} begins a new conversation; --chat-template FILE gives another template"


@dataclass(frozen=True)
class Options:
    """How answers are generated.

    Attributes:
        base: folder or id of an adapter's base model, None for the one that the adapter names.
        template: file of a chat template, None for the model's own.
        system: text of the system message.
        max_tokens: most tokens of one answer.
        temperature: 0 for the likeliest token, None for the value in the model's generation_config.json.
    """

    base: str | None = None
    template: Path | None = None
    system: str | None = None
    max_tokens: int = 512
    temperature: float | None = None


class Talk:
    """A conversation with a model.

    Attributes:
        messages: so far.

    Raises:
        ArtifactError: when packages are missing, or the model cannot be loaded.
    """

    def __init__(self, folder: Path, options: Options, say: Callable[[str], None]) -> None:
        trained = open_trained(folder)
        require_packages(
            "chatting",
            ("torch", "transformers", *(["peft"] if trained.adapter else [])),
            ("train", "torchax"),
        )
        self.options, self._say = options, say
        template, self._variables = _template(trained, options), template_variables(trained.folder)
        with doing(f"loading {trained.folder}"), _explained(trained.folder):
            self.model, self.tokenizer = _loaded(trained, options)
        if template is not None:
            self.tokenizer.chat_template = template
        if self.tokenizer.chat_template is None:
            raise ArtifactError(
                f"{trained.folder} has no chat template", "give one with --chat-template FILE"
            )
        self.messages: list[Message] = []
        self.reset()

    def reset(self) -> None:
        """Start a new conversation."""
        self.messages = [{"role": "system", "content": self.options.system}] if self.options.system else []

    def answer(self, text: str) -> str:
        """Return the model's answer, and pass its pieces to `say` as they arrive.

        Raises:
            ArtifactError: when the template rejects the conversation, which is then left as it was before.
        """
        import torch
        from jinja2 import TemplateError
        from transformers import TextStreamer

        say = self._say

        class Streamer(TextStreamer):
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                say(text + "\n" * stream_end)

        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            inputs = self.tokenizer.apply_chat_template(
                asked, add_generation_prompt=True, return_dict=True, return_tensors="pt", **self._variables
            ).to(self.model.device)
        except (TemplateError, TypeError) as error:
            raise ArtifactError(f"the chat template refuses this: {first_line(error)[:200]}", HELP) from None
        with torch.inference_mode():
            tokens = self.model.generate(
                **inputs,
                **self._sampling(),
                max_new_tokens=self.options.max_tokens,
                streamer=Streamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True),
            )
        said = self.tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        self.messages = [*asked, {"role": "assistant", "content": said}]
        return str(said)

    def _sampling(self) -> dict[str, Any]:
        """Return arguments for `generate` that complete the model's generation_config.json. An answer ends at
        that file's end tokens and at the tokenizer's own, as on a server."""
        ends = self.model.generation_config.eos_token_id
        ends = {*(ends if isinstance(ends, list) else [ends]), self.tokenizer.eos_token_id} - {None}
        given: dict[str, Any] = {"eos_token_id": sorted(ends), "pad_token_id": min(ends)} if ends else {}
        if self.options.temperature == 0:
            given |= {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        elif self.options.temperature is not None:
            given |= {"do_sample": True, "temperature": self.options.temperature}
        return given


def _loaded(trained: Trained, options: Options) -> tuple[Any, Any]:
    """Load the model, on this machine's accelerator or its CPU, and its tokenizer."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    where: dict[str, Any] = {"trust_remote_code": False}
    source: str | Path = trained.folder
    if trained.adapter is not None:
        source = options.base or trained.adapter.get("base_model_name_or_path") or ""
        if not source:
            raise ArtifactError(f"{trained.folder} does not name its base", "--base DIR names it")
        if not options.base:
            where["revision"] = trained.adapter.get("revision") or "main"
    _demand_memory(Path(source))
    config = transformers.AutoConfig.from_pretrained(source, **where)
    build = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModelForCausalLM)
    model = build.from_pretrained(source, dtype="auto", **where)
    tokenizer_of: str | Path = source
    if trained.adapter is not None:
        import peft

        model = peft.PeftModel.from_pretrained(model, trained.folder)
        if (trained.folder / GENERATION).is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(trained.folder)
        if (trained.folder / "tokenizer_config.json").is_file():
            tokenizer_of, where = trained.folder, {"trust_remote_code": False}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_of, **where)
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and device.type in ("cuda", "xpu", "mps"):  # not the device that torchax registers
        model = model.to(device)
    return model.eval(), tokenizer


def _template(trained: Trained, options: Options) -> str | None:
    """Return the chat template of the user or next to the weights; None if the tokenizer's own applies."""
    file = options.template or trained.folder / "chat_template.jinja"
    return file.read_text("utf-8") if options.template is not None or file.is_file() else None


def _demand_memory(folder: Path) -> None:
    need, there = sum(path.stat().st_size for path in folder.glob("*.safetensors")), available_memory()
    if there is not None and need > there:
        raise ArtifactError(
            f"the weights take {gb_number(need, 1)} GB, and this machine has "
            f"{gb_number(there, 1)} GB available",
            "serve it (`recipe serve up`), or use a machine with more memory",
        )


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn exceptions of transformers and PEFT in the block into an ArtifactError."""
    try:
        yield
    except (ArtifactError, MemoryError):
        raise
    except Exception as error:  # from one of these libraries, the hub or torch
        help = "check that the folder is complete; --base DIR names another base of an adapter"
        raise ArtifactError(f"{folder} cannot be loaded: {first_line(error)[:200]}", help) from error


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
