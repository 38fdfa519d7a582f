"""Load a folder of trained weights to generate text with it: complete weights, or a PEFT adapter on its base.

The folder's own files say how: config.json the type of the weights, tokenizer.json and the chat template the
prompts, generation_config.json the end tokens and the sampling.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from ..checkpoints.record import LOCK
from ..data.reasoning import VARIABLES
from ..data.stops import GENERATION, ends_of, parsed
from ..errors import UserError, first_line
from ..model.families.towers import is_of_tower
from ..model.loading import Built, build, replace_adapters
from ..model.sampling import GREEDY, Sampling
from ..model.sharding import start_mesh, tpu_devices
from ..peft.adapter import open_adapter
from ..peft.fitting import fitting, settings_of
from ..peft.importing import arrays_of
from ..peft.peft_names import ADAPTER_CONFIG
from ..process_memory import available_memory
from ..progress import Progress, readable_size
from ..settings import MeshSettings, ModelSettings
from ..weights.checkpoint import HFCheckpoint
from ..weights.locate import locate_model

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "penalty_alpha": (0.0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "guidance_scale": (1.0,),
    "bad_words_ids": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "sequence_bias": (),
    "exponential_decay_length_penalty": (),
    "stop_strings": (),
}
"""Keys of generation_config.json that change which tokens transformers generates, and that this decoder does
not have, with the values that change nothing."""

TOP_K = 50
"""transformers' top_k where generation_config.json has none."""

FLOATS = {"float32": "float32", "float16": "float32", "bfloat16": "bfloat16"}
"""The type in which weights of a type are computed here: TPUs have no float16."""


@dataclass(frozen=True)
class LoadedModel:
    """A model on this machine's devices, and what its folder says about text.

    Attributes:
        folder: of the weights, or of the adapter.
        built: the model.
        mesh: the devices.
        tokenizer: of transformers, with the folder's chat template.
        variables: of the chat template, by the record of the run that trained the model.
        ends: tokens that end an answer: those of generation_config.json, and the tokenizer's own.
        generation: generation_config.json, {} for none.
        positions: the most tokens of a prompt with its answer; None if config.json does not say.
        adapted: whether it is an adapter on a base.
    """

    folder: Path
    built: Built
    mesh: Mesh
    tokenizer: Any
    variables: Mapping[str, bool]
    ends: tuple[int, ...]
    generation: Mapping[str, Any]
    positions: int | None
    adapted: bool = False

    @property
    def where(self) -> str:
        """Return the devices in words."""
        device = self.mesh.devices.flat[0]
        count = f"{self.mesh.size} x " if self.mesh.size > 1 else ""
        return f"JAX on {count}{device.device_kind}"

    def arrays(self) -> tuple[Any, Any, Any]:
        """Return the model's structure, its adapters' arrays, and its other arrays."""
        structure, adapters, rest = nnx.split(self.built.model, nnx.LoRAParam, ...)
        return structure, adapters, rest

    def chat_tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return a conversation's tokens, up to the answer that the model is to write.

        Raises:
            UserError: when there is no chat template, or it refuses the conversation.
        """
        if self.tokenizer.chat_template is None:
            raise UserError(f"{self.folder} has no chat template", "put chat_template.jinja into the folder")
        try:
            inputs = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_dict=True, **self.variables
            )
        except Exception as error:  # a template is a program: it may raise anything
            reason = first_line(error)[:200]
            raise UserError(f"the chat template refuses this: {reason}") from error
        return list(inputs["input_ids"])


def load_model(
    folder: Path, base: str | None = None, template: str | None = None, exactly: bool = False
) -> LoadedModel:
    """Load a folder of complete weights, or of a PEFT adapter.

    Args:
        base: folder or Hugging Face id of an adapter's base; None for the one that the adapter names.
        template: a chat template, in place of the folder's.
        exactly: whether to refuse a folder whose generation_config.json asks for what is `unsupported`.

    Raises:
        UserError: when the folder cannot be read, no family describes the model, or memory does not suffice.
    """
    adapted = (folder / ADAPTER_CONFIG).is_file()
    source = base_of(folder, base) if adapted else folder
    checkpoint = HFCheckpoint.open(source)
    if not checkpoint.family.tunix:
        raise UserError(f"no family of this version describes {checkpoint.family.title}")
    content = _content(folder, GENERATION) or _content(source, GENERATION)
    generation = parsed(content or b"") or {}
    if exactly and (missing := unsupported(generation)):
        raise UserError(f"{GENERATION} sets {', '.join(missing)}, which JAX's decoder does not have")
    text_folder = folder if adapted and (folder / "tokenizer_config.json").is_file() else source
    tokenizer = _tokenizer(text_folder)
    template_file = folder / "chat_template.jinja"
    if template is not None or template_file.is_file():
        tokenizer.chat_template = template if template is not None else template_file.read_text("utf-8")
    dtype = _dtype(checkpoint)
    _demand_memory(checkpoint, dtype)
    settings = ModelSettings(id=str(source), family=checkpoint.family.name, dtype=dtype)
    mesh = mesh_here()
    lora, arrays = None, dict[str, np.ndarray]()
    if adapted:
        adapter = open_adapter(folder)
        if any(map(is_of_tower, (*adapter.tensors, *adapter.whole))):
            checkpoint = checkpoint.seeing()
        lora = settings_of(adapter, checkpoint)
        arrays = arrays_of(fitting(adapter, checkpoint, lora), checkpoint, lora)
    with Progress("loading the model", None) as progress:
        built = build(checkpoint, settings, lora, mesh, progress=progress_of(progress))
    replace_adapters(built, arrays, mesh)
    ends = [*ends_of(content, checkpoint.config), *_known([tokenizer.eos_token_id])]
    return LoadedModel(
        folder,
        built,
        mesh,
        tokenizer,
        _variables(folder),
        tuple(dict.fromkeys(ends)),
        generation,
        _positions(checkpoint.config),
        adapted,
    )


def mesh_here() -> Mesh:
    """Start JAX on all TPU devices of this machine, which split every weight, or on one device of its CPU."""
    count = tpu_devices()
    axes = {"fsdp": 1, "tp": max(1, count)}
    return start_mesh(MeshSettings("tpu" if count else "cpu", max(1, count), axes))


def unsupported(generation: Mapping[str, Any]) -> list[str]:
    """Return keys of a generation_config.json that ask for what this decoder does not have."""
    return [
        name
        for name, neutral in NEUTRAL.items()
        if generation.get(name) is not None and generation[name] not in neutral
    ]


def sampling_of(generation: Mapping[str, Any], temperature: float | None = None) -> Sampling:
    """Return how transformers' generate draws tokens by a generation_config.json.

    Args:
        temperature: 0 for the likeliest token; None for the file's choice.
    """
    if temperature == 0 or (temperature is None and not generation.get("do_sample")):
        return GREEDY
    known = _numbers(generation, {"temperature": 1.0, "top_k": TOP_K, "top_p": 1.0, "min_p": 0.0})
    drawn = known["temperature"] if temperature is None else temperature
    return Sampling(drawn, int(known["top_k"]), known["top_p"], known["min_p"])


def served_sampling(generation: Mapping[str, Any], temperature: float) -> Sampling:
    """Return how vLLM draws tokens of a request with a temperature: generation_config.json gives the rest."""
    if temperature == 0:
        return GREEDY
    known = _numbers(generation, {"top_k": 0, "top_p": 1.0, "min_p": 0.0})
    return Sampling(temperature, max(0, int(known["top_k"])), known["top_p"], known["min_p"])


def _numbers(generation: Mapping[str, Any], defaults: Mapping[str, float]) -> dict[str, float]:
    values = {name: generation.get(name) for name in defaults}
    return {
        name: value if isinstance(value, int | float) else defaults[name] for name, value in values.items()
    }


def progress_of(progress: Progress) -> Any:
    """Return what `build` calls to show its progress."""

    def show(done: int, total: int) -> None:
        progress.total = total
        progress.advance(1)

    return show


def base_of(folder: Path, base: str | None = None) -> Path:
    """Return the folder of an adapter's base.

    Args:
        base: folder or Hugging Face id in place of the one that the adapter names.
    """
    config = json.loads((folder / ADAPTER_CONFIG).read_text("utf-8"))
    address = base or config.get("base_model_name_or_path")
    if not address:
        raise UserError(f"{folder} does not name its base", "name the folder of its base")
    if Path(address).expanduser().is_dir():
        return Path(address).expanduser()
    revision = None if base else config.get("revision")
    return locate_model(ModelSettings(id=str(address), revision=revision, family=""))


def _dtype(checkpoint: HFCheckpoint) -> str:
    """Return the type in which the model is computed: that of its weights, where a TPU has it."""
    text = checkpoint.config.get("text_config") or {}
    names = (of.get(key) for of in (checkpoint.config, text) for key in ("dtype", "torch_dtype"))
    name = next((name for name in names if isinstance(name, str)), "float32")
    return FLOATS.get(name.removeprefix("torch."), "bfloat16")


def _demand_memory(checkpoint: HFCheckpoint, dtype: str) -> None:
    """Raise UserError if the weights do not fit this machine's memory, from which a TPU's are read too."""
    if tpu_devices():
        return
    parameters = checkpoint.family.parameters(checkpoint.architecture)
    size = {"float32": 4, "bfloat16": 2}[dtype]
    need = sum(int(np.prod(parameter.shape)) * size for parameter in parameters)
    available = available_memory()
    if available is not None and need > available:
        raise UserError(
            f"the weights take {readable_size(need, ' ')}, and this machine has "
            f"{readable_size(available, ' ')} available",
            "use a machine with more memory, or a server",
        )


def _tokenizer(folder: Path) -> Any:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers and the Rust parser raise any exception on a broken file
        raise UserError(
            f"the tokenizer of {folder} cannot be loaded: {first_line(error)}", "copy the folder again"
        ) from error


def _content(folder: Path, name: str) -> bytes | None:
    return (folder / name).read_bytes() if (folder / name).is_file() else None


def _known(tokens: Iterable[Any]) -> list[int]:
    return [token for token in tokens if isinstance(token, int)]


def _variables(folder: Path) -> Mapping[str, bool]:
    """Return the variables that the run gave its chat template, by the record in its folder."""
    record = parsed(_content(folder, LOCK) or b"") or {}
    return VARIABLES.get(record.get("recipe", {}).get("data", {}).get("reasoning") or "", {})


def _positions(config: Mapping[str, Any]) -> int | None:
    text = config.get("text_config") or config
    positions = text.get("max_position_embeddings") or config.get("max_position_embeddings")
    return positions if isinstance(positions, int) else None
