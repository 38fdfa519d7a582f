"""The `serve`, `benchmark` and `evaluate` sections."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

from spec.language.base import Section, distinct, fault, field


def _finite(value: Any) -> Any:
    """No infinity or NaN at any depth: flags are written as JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        raise fault(
            "E0105", f"a flag's value must be a finite number, not {value}", "quote it if it should be text"
        )
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _finite(item)
    return value


class Serve(Section):
    """A vLLM-TPU server for the trained model."""

    accelerator: str = field("The machine that serves, by name.", "v6e-8", min_length=1)
    image: str = field(
        "Container image of vLLM-TPU; a digest (name@sha256:...) pins it.",
        "vllm/vllm-tpu:gemma4",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$",
        form="the name of a container image",
    )
    weights: Literal["merged", "adapter"] = field(
        "Serve the merged weights, or the base with the adapter.", "merged"
    )
    tensor_parallel_size: int = field("Chips that one replica is split over.", 8, unit="devices", ge=1)
    data_parallel_size: int = field("Replicas of the model.", 1, unit="replicas", ge=1)
    max_model_len: int = field("Longest prompt and answer together.", 16384, unit="tokens", ge=1)
    max_num_seqs: int = field("Requests handled at once.", 64, unit="requests", ge=1)
    max_num_batched_tokens: int = field(
        "Tokens handled in one step of the server.", 4096, unit="tokens", ge=1
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"] = field(
        "Type of the key/value cache; auto is the model's own.", "fp8"
    )
    quantization: Literal["fp8"] | None = field("Quantisation of the weights; null has none.", None)
    prefix_caching: bool = field("Keep the key/value cache of common prefixes.", True)
    tool_call_parser: str | None = field(
        "vLLM's parser for tool calls; null switches tool calls off.", None, min_length=1
    )
    extra_args: Annotated[dict[str, Any], AfterValidator(_finite)] = field(
        "Further flags of `vllm serve`, without the leading dashes; true gives a flag without a value.", {}
    )
    env: dict[str, str] = field("Environment variables of the server; no secrets.", {})
    port: int = field("TCP port that the server listens on.", 8000, unit="none (a port)", ge=1, le=65535)


def _request_rate(value: Any) -> Any:
    if value == "inf" or value == math.inf:
        return "inf"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise fault("E0103", "a request rate is a number, or inf", "request_rates: [1, 4, inf]")
    if not 0 < value < math.inf:
        raise fault("E0105", f"a request rate must be above 0, not {value}", "request_rates: [1, 4, inf]")
    return value


RequestRate = Annotated[
    int | float | Literal["inf"],
    BeforeValidator(_request_rate),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"const": "inf"}]}),
]


class Benchmark(Section):
    """What `serve/bench.sh` measures."""

    input_lengths: Annotated[
        list[Annotated[int, field("Length.", unit="tokens", ge=1)]], AfterValidator(distinct)
    ] = field("Prompt lengths to measure.", [512, 4096], unit="tokens", min_length=1)
    output_length: int = field("Length of each answer.", 512, unit="tokens", ge=1)
    request_rates: Annotated[list[RequestRate], AfterValidator(distinct)] = field(
        "Request rates to measure; inf sends all at once.",
        [1, 4, 16, "inf"],
        unit="requests per second",
        min_length=1,
    )
    prompts: int = field("Requests per measurement.", 100, unit="requests", ge=1)


class Evaluate(Section):
    """What `serve/eval.sh` runs against the server."""

    tasks: Annotated[list[str], AfterValidator(distinct)] = field("lm-eval tasks.", [])
    prompts: str | None = field(
        "A JSONL file of prompts, each with a regular expression that the answer must match; null has none.",
        None,
        min_length=1,
    )
    samples: int = field("Answers drawn for each prompt.", 1, unit="answers", ge=1)
    temperature: float = field(
        "Sampling temperature; 0 always takes the likeliest token.",
        0.0,
        unit="none",
        ge=0,
        allow_inf_nan=False,
    )
