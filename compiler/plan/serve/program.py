"""Make the compile job of a recipe's server: one replica's step, at some depths."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering import hardware
from recipec.compiler.lowering.families import architecture_class
from recipec.compiler.lowering.fewer_layers import period
from recipec.compiler.lowering.program import Program
from recipec.compiler.plan.serve.job import Bucket, ServeJob
from recipec.compiler.serving import blocks
from recipec.compiler.serving.features import runs_jax_model
from recipec.compiler.serving.flags import by_flag
from recipec.compiler.serving.memory import memory_share

PREFILL_TOKENS = 1024
"""The largest prefill step that is compiled, because larger steps take minutes longer. Gemma 4 31B's step of
4,096 tokens has 3.6 % more cycles than four steps of this size."""

HOST_CHIPS = 4
"""Chips of the smallest topology that libtpu describes."""

LEAST_TOKENS = 16
"""Tokens of the server's smallest bucket. Each further bucket is twice as large."""


def job(program: Program, layers: Sequence[int], **changes: Any) -> ServeJob:
    """Return the job to compile for a recipe's `serve` section.

    Args:
        program: the program of a recipe with a `serve` section.
        layers: depths to compile.
        changes: fields of the job that differ from the recipe.

    Raises:
        ArtifactError: the recipe has no `serve` section, or its server cannot be compiled here.
    """
    serve, accelerator = program.recipe.serve, program.serve_accelerator
    if serve is None or accelerator is None:
        raise ArtifactError("the recipe has no `serve` section", "add one, or plan without --serve")
    _refuse(program)
    size = changes.pop("tensor_parallel", serve.tensor_parallel_size)
    sequences = changes.pop("max_num_seqs", serve.max_num_seqs)
    flags = by_flag(serve.extra_args)
    prefill = min(serve.max_num_batched_tokens, PREFILL_TOKENS)
    vllm = hardware.generations()[accelerator.generation]["vllm"]
    made = ServeJob(
        config=config_of(program),
        model_layers=program.architecture.num_layers,
        layers=tuple(layers),
        generation=accelerator.generation,
        chip=vllm["name"],
        kernel_version=vllm["kernel_version"],
        topology=replica_topology(accelerator.generation, size),
        tensor_parallel=size,
        kv_cache_dtype=serve.kv_cache_dtype,
        max_model_len=serve.max_model_len,
        max_num_seqs=sequences,
        max_num_batched_tokens=serve.max_num_batched_tokens,
        buckets=(Bucket("decode", padded(sequences)), Bucket("prefill", padded(prefill))),
        hbm_bytes=(accelerator.hbm_gib or 0) * 2**30 / accelerator.devices_per_chip,
        memory_share=memory_share(serve.extra_args),
        pages=flags.get("num-gpu-blocks-override"),
        page_tokens=flags.get("block-size"),
        environment=tuple(sorted(blocks.environment(serve).items())),
    )
    return replace(made, **changes)


def _refuse(program: Program) -> None:
    serve, accelerator = program.recipe.server, program.serve_accelerator
    assert accelerator is not None
    without = "plan its serving on paper, without --serve"
    config = config_of(program)
    compiled = hardware.supported_by_vllm("advised", "tested")
    if accelerator.generation not in compiled:
        raise ArtifactError(
            f"the serving step is compiled for {', '.join(compiled)}, and not for {accelerator.generation}",
            without,
        )
    if not runs_jax_model(config, serve):
        raise ArtifactError(
            f"tpu-inference serves {architecture_class(config)} by vLLM's PyTorch model, "
            "which is not compiled here",
            without,
        )
    if serve.quantization or (serve.weights == "merged" and program.recipe.merge.quantization):
        raise ArtifactError("the serving step is compiled only with bfloat16 weights", without)


def config_of(program: Program) -> dict[str, Any]:
    """Return the model's config.json, with the fields that transformers needs and the catalog leaves out.

    A configuration from the catalog has no vision tower. Then only the text model is compiled.
    """
    config = copy.deepcopy(dict(program.config))
    text = config.get("text_config", config)
    if len(set(program.architecture.layer_types)) > 1:
        text.update(program.family.kinds(program.config, range(program.architecture.num_layers)))
    serve = program.recipe.serve
    least = serve.max_model_len if serve else 0
    text["max_position_embeddings"] = max(text.get("max_position_embeddings") or 0, least)
    config.setdefault("dtype", "bfloat16")
    if config.get("architectures") == ["Gemma4ForConditionalGeneration"]:
        config.setdefault("tie_word_embeddings", True)
        if not config.get("vision_config"):
            config["architectures"] = ["Gemma4ForCausalLM"]
    return config


def replica_topology(generation: str, devices: int) -> str:
    """Return the smallest topology with at least `devices` devices: "v6e:2x2" for 4.

    A replica may use only some of the topology's devices.
    """
    data = hardware.generations()[generation]
    for shape in data["topologies"]:
        chips = math.prod(map(int, shape.split("x")))
        if chips >= HOST_CHIPS and chips * data["devices_per_chip"] >= devices:
            return f"{generation}:{shape}"
    raise ArtifactError(
        f"{generation} has no topology of {devices} devices", "choose a smaller tensor_parallel_size"
    )


def padded(tokens: int) -> int:
    """Return the size of the server's bucket for `tokens` tokens."""
    return max(LEAST_TOKENS, 1 << (tokens - 1).bit_length())


def depths(program: Program, exact: bool) -> list[tuple[int, ...]]:
    """Return the depths to compile, best first. The next entry is used if this machine's memory runs out.

    An entry of two depths has whole repeats of the layer pattern. A model whose last layers reuse the keys
    and values of others has no such repeats, and is compiled whole.
    """
    count = program.architecture.num_layers
    unit = period(program.architecture.layer_types)
    unit *= -(-2 // unit)
    short = (unit, 2 * unit)
    if getattr(program.architecture, "kv_shared_layers", 0) or 2 * unit >= count or count % unit:
        return [(count,)]
    return [(count,), short] if exact else [short]
