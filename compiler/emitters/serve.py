"""serve/: a container image, its compose file and a script for a bare TPU VM.

All three start the same server: `server_flags` and `server_environment` are the one place that says how.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from compiler.render import render

if TYPE_CHECKING:
    from compiler.program import Program
    from spec.language import Serve

WEIGHTS = "/model"
"""Where the container finds the merged weights."""

CACHE = "/cache/xla"
"""Where the container keeps compiled programs, so that a restart does not compile them again."""

SHARED_MEMORY = "16gb"
"""What the processes of one server exchange data through; the container's default of 64 MB stops them."""

STARTUP_MINUTES = 30
"""Loading and the first compilation of a large model; about 8 min of compilation were seen for 31B."""

FAMILY_FLAGS: Mapping[str, Mapping[str, Any]] = {
    # Its attention sees an image's tokens in both directions, so no chunk may end within an image.
    "gemma4": {"disable-chunked-mm-input": True},
}


def emit_serve(program: Program) -> dict[str, str]:
    """The files of serve/; none without a `serve` section."""
    serve, accelerator = program.recipe.serve, program.serve_accelerator
    if serve is None or accelerator is None:
        return {}
    values = {
        "name": program.name,
        "model": program.recipe.model.id,
        "accelerator": accelerator.name,
        "image": serve.image,
        "port": serve.port,
        "flags": flag_words(server_flags(program.name, serve, program.family.name)),
        "environment": server_environment(serve),
        "weights": WEIGHTS,
        "cache": CACHE,
        "shared_memory": SHARED_MEMORY,
        "startup_minutes": STARTUP_MINUTES,
        "merged": local_weights(program),
    }
    files = ("serve/Dockerfile", "serve/compose.yaml", "serve/serve.sh")
    return {file: render(file, **values) for file in files}


def local_weights(program: Program) -> str | None:
    """Where merge.py leaves the weights by default, relative to the artifact's folder.

    None when that is an address, which cannot be mounted, or a name that a shell would read otherwise:
    then the folder has to be given.
    """
    output = program.recipe.merge.output
    return output.rstrip("/") if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._/-]*", output) else None


def server_flags(name: str, serve: Serve, family: str) -> dict[str, Any]:
    """The flags of `vllm serve` by name, without dashes; True stands for a flag without a value.

    Args:
        name: of the recipe, under which clients ask for the model.
        family: of the model.
    """
    flags: dict[str, Any] = {
        "served-model-name": name,
        "host": "0.0.0.0",
        "port": serve.port,
        "tensor-parallel-size": serve.tensor_parallel_size,
    }
    if serve.data_parallel_size > 1:
        flags["data-parallel-size"] = serve.data_parallel_size
    flags |= {
        "max-model-len": serve.max_model_len,
        "max-num-seqs": serve.max_num_seqs,
        "max-num-batched-tokens": serve.max_num_batched_tokens,
        "kv-cache-dtype": serve.kv_cache_dtype,
    }
    if serve.quantization is not None:
        flags["quantization"] = serve.quantization
    flags["enable-prefix-caching" if serve.prefix_caching else "no-enable-prefix-caching"] = True
    if serve.tool_call_parser is not None:
        flags |= {"enable-auto-tool-choice": True, "tool-call-parser": serve.tool_call_parser}
    flags |= FAMILY_FLAGS.get(family, {})
    return flags | {key.replace("_", "-"): value for key, value in serve.extra_args.items()}


def flag_words(flags: Mapping[str, Any]) -> list[list[str]]:
    """The words of each flag: its name and its values, if any."""
    words = []
    for name, value in flags.items():
        if value is None:
            continue
        if isinstance(value, bool):
            words.append([f"--{name}" if value else f"--no-{name}"])
        elif isinstance(value, list):
            words.append([f"--{name}", *map(_word, value)])
        else:
            words.append([f"--{name}", _word(value)])
    return words


def server_environment(serve: Serve) -> dict[str, str]:
    """Environment variables of the server; the recipe's win."""
    # The weights are local: the server need not ask the hub, nor report usage.
    return {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **serve.env}


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
