"""The checkpoint in transformers: its tokenizer, its template, and its log probabilities of the answers.

The endpoint's answer is fed back (teacher forcing). At every step both models have therefore read the same
tokens, so no difference depends on an earlier one, and one pass of the model gives all steps.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipec.compiler.catalog import tensors_in
from recipec.compiler.lowering.sizes import BYTES
from recipec.compiler.pages.numbers import gb_number
from recipec.compiler.trained.model_folder import template_variables
from recipec.runtime.errors import UserError, first_line
from recipec.runtime.process_memory import available_memory

_WHOLE = "give the complete folder that merge.py wrote"

SPARE = 1.5e9
"""Bytes besides the weights: torch itself, activations, and log probabilities over a large vocabulary."""


@dataclass(frozen=True)
class ServedTypes:
    """The types in which the server computes, as far as its flags show.

    Attributes:
        dtype: of weights and activations.
        kv_cache: of keys and values; "auto" means `dtype`.
        weights: "fp8" if the server quantizes them itself; else None.
        source: where this information comes from.
    """

    dtype: str
    kv_cache: str = "auto"
    weights: str | None = None
    source: str = "the options"

    def __str__(self) -> str:
        parts = [self.dtype]
        if self.kv_cache not in ("auto", self.dtype):
            parts.append(f"{self.kv_cache} keys and values")
        if self.weights:
            parts.append(f"{self.weights} weights")
        return ", ".join(parts)


def torch() -> Any:
    """Import and return the package torch."""
    return _package("torch")


def transformers() -> Any:
    """Import and return the package transformers, with its log output reduced."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    package = _package("transformers")
    package.logging.set_verbosity_error()
    package.logging.disable_progress_bar()
    return package


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"verifying compares with transformers, and {error.name or name} is not installed",
            "pip install torch transformers",
        ) from None


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a checkpoint.

    Raises:
        UserError: when it does not exist.
    """
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is not an object")
        return config
    except OSError:
        what = "is not a checkpoint: it has no config.json" if folder.is_dir() else "is not there"
        raise UserError(f"{folder} {what}", "run merge.py, or name the merged folder with --model") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{folder / 'config.json'} is not JSON: {error}", "merge again") from None


def config_dtype(config: Mapping[str, Any]) -> str:
    """Return the type of a checkpoint's weights, from its config.json."""
    text = config.get("text_config") or {}
    for part in (config, text):
        for key in ("dtype", "torch_dtype"):
            if isinstance(part.get(key), str):
                return str(part[key])
    return "float32"


def local_span(config: Mapping[str, Any]) -> int | None:
    """Return the most tokens that a local layer sees, by its window or its chunks; None if every layer sees
    the whole context."""
    for part in (config.get("text_config") or {}, config):
        window = part.get("sliding_window") if part.get("use_sliding_window", True) else None
        for span in (window, part.get("attention_chunk_size")):
            if isinstance(span, int):
                return span
    return None


def refuse_too_large(folder: Path, dtype: str) -> None:
    """Check that the weights fit into memory.

    Args:
        dtype: "float32" or "bfloat16", the type in which they are held.

    Raises:
        UserError: when they do not fit, or do not exist.
    """
    numbers = count_numbers(folder)
    available = available_memory()
    need = numbers * BYTES[dtype] * 1.05 + SPARE
    if available is None or need <= available:
        return
    smaller = numbers * BYTES["bfloat16"] * 1.05 + SPARE
    other = f"--dtype bfloat16 takes {gb_number(smaller, 1)} GB, or " if dtype == "float32" else ""
    raise UserError(
        f"{folder} has {numbers / 1e9:.2f} billion numbers, which take {gb_number(need, 1)} GB in {dtype}, "
        f"and this machine has {gb_number(available, 1)} GB available",
        f"{other}run it on a machine with more memory; only the URL and the folder are needed there",
    )


def count_numbers(folder: Path) -> int:
    """Count the numbers in the safetensors files of a folder, by their headers.

    Raises:
        UserError: when there are no such files, or one is damaged.
    """
    try:
        listed = tensors_in(folder)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"the weights of {folder} are damaged: {reason}", "merge again") from None
    if not listed:
        raise UserError(f"{folder} holds no weights: no .safetensors file", "run merge.py")
    return sum(math.prod(tensor.shape) for tensor in listed.values())


class ReferenceTokenizer:
    """The checkpoint's tokenizer and template.

    Raises:
        UserError: when they cannot be loaded.
    """

    def __init__(self, folder: Path) -> None:
        self._variables = template_variables(folder)
        try:
            self._tokenizer = transformers().AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"{folder} has no tokenizer that can be loaded: {first_line(error)[:200]}", _WHOLE
            ) from None

    @property
    def has_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    def of_text(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text)["input_ids"])

    def of_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        try:
            tokens = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=True,
                return_dict=True,
                **self._variables,
            )
        except Exception as error:  # any error that a template raises
            raise UserError(
                f"the chat template refuses a prompt: {first_line(error)[:200]}",
                "it is the folder's template: check that it was made for this model",
            ) from None
        return tuple(tokens["input_ids"])

    def show(self, tokens: Sequence[int]) -> str:
        """Return tokens as text, including special tokens."""
        return str(self._tokenizer.decode(list(tokens)))


class Reference:
    """The checkpoint's model.

    Args:
        dtype: "float32" or "bfloat16".

    Raises:
        UserError: when transformers cannot load it.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], dtype: str) -> None:
        library = torch()
        try:
            build = getattr(transformers(), config["architectures"][0])
            # Eager attention, because transformers' other implementations ignore soft-caps.
            self.model = build.from_pretrained(
                folder,
                dtype=getattr(library, dtype),
                attn_implementation="eager",
                trust_remote_code=False,
                low_cpu_mem_usage=True,
            ).eval()
        except (OSError, ValueError, KeyError, LookupError, AttributeError, ImportError) as error:
            why = first_line(error)[:200]
            raise UserError(f"transformers does not load {folder}: {why}", _WHOLE) from None
        self.vocabulary = int(self.model.get_input_embeddings().weight.shape[0])

    def logprobs(self, prompt: Sequence[int], tokens: Sequence[int], kv_cache: str = "auto") -> Any:
        """Return log probabilities of every token at each step of an answer: float32, shape [step, token].

        Args:
            prompt, tokens: token ids.
            kv_cache: "fp8..." rounds keys and values, as a server with such a cache does.
        """
        library = torch()
        ids = library.tensor([[*prompt, *tokens][:-1]])
        cache = {"past_key_values": _rounded_cache(kv_cache), "use_cache": True} if "fp8" in kv_cache else {}
        with library.inference_mode():
            logits = self.model(
                input_ids=ids,
                attention_mask=library.ones_like(ids),
                logits_to_keep=len(tokens),
                **(cache or {"use_cache": False}),
            ).logits[0]
        return logits[-len(tokens) :].float().log_softmax(-1).numpy()

    def lower(self, types: ServedTypes) -> None:
        """Round the model, in place, to the types of a server."""
        library = torch()
        if types.weights:
            with library.inference_mode():
                for module in self.model.modules():
                    if isinstance(module, library.nn.Linear):
                        module.weight.copy_(_fp8_rows(module.weight))
        self.model.to(getattr(library, types.dtype))


def _rounded_cache(dtype: str) -> Any:
    """Return a cache that rounds keys and values to fp8 at a scale of 1, as vLLM does without calibration."""
    library, caches = torch(), _package("transformers.cache_utils")
    narrow = library.float8_e5m2 if "e5m2" in dtype else library.float8_e4m3fn
    largest = library.finfo(narrow).max

    class Rounded(caches.DynamicCache):  # type: ignore[name-defined]
        def update(self, keys: Any, values: Any, *rest: Any, **more: Any) -> Any:
            keys, values = (x.float().clamp(-largest, largest).to(narrow).to(x.dtype) for x in (keys, values))
            return super().update(keys, values, *rest, **more)

    return Rounded()


def _fp8_rows(weight: Any) -> Any:
    """Round a matrix to fp8, with one scale for each row."""
    library = torch()
    scale = weight.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return ((weight.float() / scale).to(library.float8_e4m3fn).float() * scale).to(weight.dtype)
