"""What computes the answers of `recipe chat`: the decoder that trains, in JAX, or transformers, in torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from recipec.compiler import store
from recipec.compiler.errors import ArtifactError
from recipec.compiler.packages import PACKAGES, install, missing_packages, require_packages
from recipec.compiler.pages.numbers import gb_number
from recipec.compiler.terminal import note
from recipec.compiler.trained.model_folder import Trained
from recipec.runtime.compilation_cache import keep_compiled
from recipec.runtime.data.stops import GENERATION
from recipec.runtime.errors import UserError, first_line
from recipec.runtime.process_memory import available_memory

ENGINES = ("auto", "jax", "transformers")
TRAINING = ("train",)
"""The extra whose packages JAX's decoder needs."""


@dataclass(frozen=True)
class Options:
    """How answers are generated.

    Attributes:
        base: folder or id of an adapter's base model, None for the one that the adapter names.
        template: file of a chat template, None for the model's own.
        system: text of the system message.
        max_tokens: most tokens of one answer.
        temperature: 0 for the likeliest token, None for the value in the model's generation_config.json.
        engine: one of ENGINES.
    """

    base: str | None = None
    template: Path | None = None
    system: str | None = None
    max_tokens: int = 512
    temperature: float | None = None
    engine: str = "auto"


class Engine(Protocol):
    """A loaded model.

    Attributes:
        title: what computes, and on which device.
        tokenizer: of transformers.
        positions: the most tokens of a prompt with its answer; None if the model does not say.
    """

    title: str
    tokenizer: Any
    positions: int | None

    def answer(self, prompt: list[int], most: int, say: Callable[[str], None]) -> list[int]:
        """Return the tokens of an answer of at most `most`, and pass its text to `say` as it arrives."""


def load_engine(trained: Trained, options: Options) -> Engine:
    """Load a model with the engine that the options name; "auto" prefers JAX, and says why if it cannot.

    Raises:
        ArtifactError: when packages are missing, or the model cannot be loaded.
    """
    reason = None
    if options.engine == "auto":
        reason = _better_with_torch()
    missing = missing_packages(PACKAGES)
    if missing:
        reason = f"JAX's decoder needs {', '.join(missing)}"
        if options.engine == "jax":
            raise ArtifactError(f"{reason}, which cannot be imported", install(*TRAINING))
    if options.engine != "transformers" and reason is None:
        try:
            return JaxEngine(trained, options)
        except UserError as error:
            if options.engine == "jax":
                raise ArtifactError(error.message, error.help or "--engine transformers") from None
            reason = error.message
    if reason is not None:
        note(f"note: transformers answers: {reason}")
    return TransformersEngine(trained, options)


def _better_with_torch() -> str | None:
    """Return which accelerator of this machine torch has, and the project's JAX does not."""
    if sys.platform == "darwin" or Path("/dev/nvidiactl").exists():
        return "torch computes on this machine's GPU, and JAX here only on TPUs and CPUs"
    return None


class JaxEngine:
    """The model in the decoder that trains, on the TPU of this machine or its CPU.

    Raises:
        UserError: when the decoder cannot answer as transformers would.
    """

    def __init__(self, trained: Trained, options: Options) -> None:
        from recipec.runtime.inference.loaded_model import load_model, sampling_of
        from recipec.runtime.inference.text_generator import TextGenerator

        keep_compiled(str(store.folder().parent))
        template = _template(trained, options)
        model = load_model(trained.folder, options.base, template, exactly=True)
        self._generator = TextGenerator(model)
        self._sampling = sampling_of(model.generation, options.temperature)
        self.title, self.tokenizer, self.positions = model.where, model.tokenizer, model.positions

    def answer(self, prompt: list[int], most: int, say: Callable[[str], None]) -> list[int]:
        """See Engine."""
        from recipec.runtime.inference.text_generator import Request, TextStream

        request = Request(prompt, most, self._sampling, self._generator.model.ends)
        stream, tokens = TextStream(self.tokenizer), list[int]()
        for (answer,) in self._generator.stream([request]):
            tokens = answer.tokens
            say(stream.text(tokens, answer.complete))
        say("\n")
        return tokens


class TransformersEngine:
    """The model in transformers, on this machine's GPU or its CPU.

    Raises:
        ArtifactError: when packages are missing, or the model cannot be loaded.
    """

    def __init__(self, trained: Trained, options: Options) -> None:
        require_packages(
            "chatting",
            ("torch", "transformers", *(["peft"] if trained.adapter else [])),
            ("train", "torchax"),
        )
        with _explained(trained.folder):
            self.model, self.tokenizer = _loaded(trained, options)
        template = _template(trained, options)
        if template is not None:
            self.tokenizer.chat_template = template
        self._temperature = options.temperature
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        self.positions = positions if isinstance(positions, int) else None
        self.title = f"transformers on {self.model.device}"

    def answer(self, prompt: list[int], most: int, say: Callable[[str], None]) -> list[int]:
        """See Engine."""
        import torch
        from transformers import TextStreamer

        class Streamer(TextStreamer):
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                say(text + "\n" * stream_end)

        tokens = torch.tensor([prompt], device=self.model.device)
        with torch.inference_mode():
            written = self.model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                **self._sampling(),
                max_new_tokens=most,
                streamer=Streamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True),
            )
        return list(written[0, len(prompt) :].tolist())

    def _sampling(self) -> dict[str, Any]:
        """Return arguments for `generate` that complete the model's generation_config.json. An answer ends at
        that file's end tokens and at the tokenizer's own, as on a server."""
        ends = self.model.generation_config.eos_token_id
        ends = {*(ends if isinstance(ends, list) else [ends]), self.tokenizer.eos_token_id} - {None}
        options: dict[str, Any] = {"eos_token_id": sorted(ends), "pad_token_id": min(ends)} if ends else {}
        if self._temperature == 0:
            options |= {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        elif self._temperature is not None:
            options |= {"do_sample": True, "temperature": self._temperature}
        return options


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
