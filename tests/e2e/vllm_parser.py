"""Parse many command lines with vllm-tpu's own parser and configuration layer, in one process.

It runs in the serving environment, where this project is not installed: `python vllm_parser.py ASKED
ANSWERS`, both JSON. No TPU is needed. The script replaces only the chip's version, which the attention kernel
reads from the machine to choose its block sizes.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

OFFLINE = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "SKIP_JAX_PRECOMPILE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
MOST_SAID = 2000
PARSERS: list[Any] = []
"""The parser, after it was made."""


def main(asked_file: str, answers_file: str) -> None:
    os.environ.update(OFFLINE)
    with open(asked_file, encoding="utf-8") as file:
        asked = json.load(file)
    started = time.monotonic()
    answers: dict[str, Any] = {"lines": [line(case) for case in asked["lines"]]}
    answers["lines_seconds"] = time.monotonic() - started
    started = time.monotonic()
    answers["engines"] = [engine(case) for case in asked["engines"]]
    answers["engines_seconds"] = time.monotonic() - started
    answers["blocks"] = [block(case) for case in asked["blocks"]]
    answers["pages"] = [page(case) for case in asked["pages"]]
    answers["features"] = features(asked["architectures"])
    answers["adapters"] = [adapter(config) for config in asked["adapters"]]
    with open(answers_file, "w", encoding="utf-8") as file:
        json.dump(answers, file)


def parsed(words: list[str]) -> Any:
    """Parse the arguments of `vllm serve`.

    Raises:
        SystemExit: the parser refuses them.
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if not PARSERS:
        PARSERS.append(make_arg_parser(FlexibleArgumentParser(prog="vllm serve")))
    return PARSERS[0].parse_args(words)


def line(words: list[str]) -> str:
    """Return the parser's message about words after the model, or "" if it accepts them."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed(["model", *words])
    except SystemExit:
        return said.getvalue().strip().rpartition("\n")[2][-MOST_SAID:] or "refused"
    except Exception as error:  # any error is a refusal
        return f"{type(error).__name__}: {error}"[:MOST_SAID]
    return ""


def engine(case: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's configuration of a command line, or its refusal.

    Args:
        case: "words" after `vllm serve`, and "environment".
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args
    from vllm.usage.usage_lib import UsageContext

    said = io.StringIO()
    before = dict(os.environ)
    os.environ.update(case["environment"])
    started = time.monotonic()
    try:
        with contextlib.redirect_stderr(said):
            arguments = parsed(case["words"])
            validate_parsed_serve_args(arguments)
            arguments.model = arguments.model_tag
            engine_arguments = AsyncEngineArgs.from_cli_args(arguments)
            # As in `vllm serve`, where the server is not the engine's process.
            engine_arguments._api_process_rank = -1
            made = engine_arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    except SystemExit:
        return {"refused": said.getvalue().strip().rpartition("\n")[2][-MOST_SAID:]}
    except Exception as error:  # any error is a refusal
        return {"refused": f"{type(error).__name__}: {error}"[:MOST_SAID]}
    finally:
        os.environ.clear()
        os.environ.update(before)
    lora = made.lora_config
    return {
        "refused": None,
        "seconds": time.monotonic() - started,
        "architectures": list(made.model_config.architectures),
        "tensor_parallel": made.parallel_config.tensor_parallel_size,
        "data_parallel": made.parallel_config.data_parallel_size,
        "max_model_len": made.model_config.max_model_len,
        "max_num_seqs": made.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": made.scheduler_config.max_num_batched_tokens,
        "cache_dtype": made.cache_config.cache_dtype,
        "page": made.cache_config.block_size,
        "prefix_caching": made.cache_config.enable_prefix_caching,
        "served": made.model_config.served_model_name,
        "trust_remote_code": made.model_config.trust_remote_code,
        "host": arguments.host,
        "port": arguments.port,
        "lora": None if lora is None else lora.max_lora_rank,
        "lora_modules": [[one.name, one.path] for one in arguments.lora_modules or []],
    }


def block(case: dict[str, Any]) -> int:
    """Return the tokens of the decode kernel's default block."""
    import jax.numpy as jnp
    from tpu_inference.kernels.ragged_paged_attention.v3 import kernel

    # The original reads jax.devices()[0], which is a CPU here.
    kernel.get_tpu_version = lambda: case["version"]
    sizes = kernel.get_default_block_sizes(
        jnp.bfloat16,
        {1: jnp.float8_e4m3fn, 2: jnp.bfloat16}[case["number_bytes"]],
        case["query_heads"],
        case["heads"],
        case["head_dim"],
        case["page"],
        case["sequences"],
        case["sequences"],
        -(-case["max_model_len"] // case["page"]),
        case=kernel.RpaCase.DECODE,
    )
    return int(sizes["bkv_sz"])


def page(case: dict[str, Any]) -> int:
    """Return the tokens of a page of the cache."""
    from tpu_inference.layers.vllm.backends.flash_attn import PallasAttentionBackend

    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=case["max_model_len"]),
        scheduler_config=SimpleNamespace(max_num_seqs=case["sequences"]),
    )
    backend = PallasAttentionBackend
    return max(backend.get_page_size(config), backend.get_min_page_size(config))


def features(architectures: list[str]) -> dict[str, Any]:
    """Return what the sources say about adapters and structured outputs."""
    import dataclasses
    from importlib.util import find_spec

    from tpu_inference.layers.common.sharding import ShardingConfigManager
    from tpu_inference.models.common import model_loader
    from tpu_inference.runner.compilation_manager import CompilationManager
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_lora

    modules = {
        "guidance": "llguidance",
        "lm-format-enforcer": "lmformatenforcer",
        "outlines": "outlines_core",
        "xgrammar": "xgrammar",
    }
    models = {name: implementation(name) for name in architectures}
    return {
        "models": models,
        "adapters": {
            name: bool(supports_lora(ModelRegistry._try_load_model_cls(name)))
            for name, way in models.items()
            if way
        },
        "jax_adapters": "lora_manager, model = None, None"
        not in inspect.getsource(model_loader.get_flax_model),
        "refused_in_one_process": "LoRA is not supported with data parallelism"
        in inspect.getsource(ShardingConfigManager.validate),
        "structured_in_one_process": "structured decoding is not supported with DP"
        not in inspect.getsource(CompilationManager._precompile_structured_decoding),
        "adapter_fields": sorted(field.name for field in dataclasses.fields(PEFTHelper)),
        "backends": sorted(name for name, module in modules.items() if find_spec(module)),
    }


def adapter(config: dict[str, Any]) -> str:
    """Return why vLLM's loader refuses an adapter_config.json, or "" if it accepts the file."""
    from vllm.config.lora import LoRAConfig
    from vllm.lora.peft_helper import PEFTHelper

    try:
        PEFTHelper.from_dict(config).validate_legal(LoRAConfig(max_lora_rank=512))
    except ValueError as error:
        return str(error)
    return ""


def implementation(architecture: str) -> str | None:
    """Return who implements a model class, or None if neither registry has it.

    tpu-inference's JAX model is used if it exists and is preferred, and else vLLM's own or transformers' in
    vLLM.
    """
    from tpu_inference.models.common import model_loader
    from vllm.model_executor.models import ModelRegistry

    if architecture not in model_loader._VLLM_PREFERRED_ARCHITECTURES:
        with contextlib.suppress(model_loader.UnsupportedArchitectureError):
            model_loader._get_model_architecture(SimpleNamespace(architectures=[architecture]))
            return "jax"
    known = ModelRegistry.models.get(architecture)
    if known is None:
        return None
    return "transformers" if ".transformers" in getattr(known, "module_name", "") else "torch"


if __name__ == "__main__":
    # Libraries print during their import. The caller reads only the file.
    sys.stdout = sys.stderr
    main(*sys.argv[1:])
