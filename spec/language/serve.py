"""The `serve`, `benchmark` and `evaluate` sections."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from recipec.spec.core_schema import flow
from recipec.spec.key_paths import Part, join
from recipec.spec.language.section import E0103, E0105, LARGEST, Section, distinct, fault, field


def _finite(value: Any) -> Any:
    """Validate that there is no infinity or NaN at any depth, because flags are written as JSON."""
    for where, item in _leaves(value):
        if isinstance(item, float) and not math.isfinite(item):
            message = f"a flag's value must be a finite number, not {flow(item)}"
            below = join(where)
            at = below if below.startswith("[") else f".{below}"
            raise fault(E0105, message, f'put quotes around it if it is text: "{item}"', at=at)
    return value


def _leaves(value: Any, where: tuple[Part, ...] = ()) -> Iterator[tuple[tuple[Part, ...], Any]]:
    """Yield every single value in nested lists and mappings, with its path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _leaves(item, (*where, key))
    if not isinstance(value, dict | list):
        yield where, value


Positive = Annotated[int, Field(ge=1, le=LARGEST)]
NonEmpty = Annotated[str, Field(min_length=1)]


class Autoscaling(Section):
    """Number of replicas on Kubernetes, depending on the requests that wait."""

    min_replicas: int = field("Smallest number of replicas.", 1, unit="replicas", ge=1)
    max_replicas: int = field("Largest number of replicas.", 2, unit="replicas", ge=1)
    waiting_requests: int = field(
        "Average number of waiting requests per replica above which another replica starts.",
        10,
        unit="requests",
        ge=1,
    )


class Serve(Section):
    """A vLLM-TPU server for the trained model."""

    accelerator: str = field("Name of the machine that serves.", "v6e-8", min_length=1)
    image: str = field(
        "Container image of vLLM-TPU; a digest (name:tag@sha256:...) pins it.",
        "vllm/vllm-tpu:v0.32.0",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$",
        form="the name of a container image",
    )
    weights: Literal["merged", "adapter"] = field(
        "Serve the merged weights, or the base with the adapter.",
        "merged",
        choices={
            "merged": "The checkpoint that merge.py wrote.",
            "adapter": "The base model with the PEFT adapter.",
        },
    )
    model: str | None = field(
        "Location of the weights that vLLM loads: a folder, a gs:// address or a Hugging Face id; null uses "
        "merge.output, or model.id with `weights: adapter`.",
        None,
        min_length=1,
        example="gs://bucket/merged",
    )
    tensor_parallel_size: int = field("Devices that share one replica.", 8, unit="devices", ge=1)
    data_parallel_size: int = field("Replicas of the model.", 1, unit="replicas", ge=1)
    max_model_len: int = field(
        "Largest length of a prompt and its answer together; by default at most the model's positions.",
        16384,
        unit="tokens",
        ge=1,
    )
    max_num_seqs: int = field("Requests processed at once.", 64, unit="requests", ge=1)
    max_num_batched_tokens: int = field(
        "Tokens processed in one step of the server.", 4096, unit="tokens", ge=1
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"] = field(
        "Type of the key/value cache; auto is the model's type.",
        "fp8",
        choices={
            "auto": "The model's type.",
            "bfloat16": "16 bits a number.",
            "fp8": "8 bits a number, as fp8_e4m3.",
            "fp8_e4m3": "8 bits: 4 of exponent, 3 of mantissa.",
            "fp8_e5m2": "8 bits: 5 of exponent, 2 of mantissa.",
        },
    )
    quantization: Literal["fp8"] | None = field(
        "Quantization of the weights; null does not quantize.",
        None,
        example="fp8",
        choices={"fp8": "8 bits a weight, quantized during loading."},
    )
    prefix_caching: bool = field("Keep the key/value cache of common prefixes.", True)
    tool_call_parser: str | None = field(
        "vLLM's parser for tool calls; null switches tool calls off.", None, min_length=1, example="hermes"
    )
    decode_block_sizes: list[Positive] | None = field(
        "Block sizes of the decode kernel (RPA_V3_DECODE_BLOCK_SIZES); null uses tpu-inference's own.",
        None,
        unit="sequences, tokens, sequences, tokens",
        min_length=4,
        max_length=4,
        example=[8, 1024, 8, 1024],
    )
    extra_args: Annotated[dict[str, Any], AfterValidator(_finite)] = field(
        "More flags of `vllm serve`, without leading dashes; true gives a flag without a value.",
        {},
        example={"enable-chunked-prefill": True},
    )
    env: dict[str, str] = field(
        "Environment variables of the server. They must not contain secrets.",
        {},
        example={"VLLM_LOGGING_LEVEL": "INFO"},
    )
    host: str = field(
        "Address that the server listens on. An address other than loopback needs an API key (VLLM_API_KEY).",
        "127.0.0.1",
        pattern=r"^[0-9A-Za-z:][0-9A-Za-z.:-]*$",
        form="an IP address or a host's name",
    )
    port: int = field("TCP port that the server listens on.", 8000, unit="none (a port)", ge=1, le=65535)
    smoke_prompts: list[NonEmpty] = field(
        "Prompts for smoke.sh, whose answers must differ from the base model's; [] uses built-in prompts.",
        [],
        example=["Who are you?"],
    )
    autoscaling: Autoscaling | None = field(
        "Autoscaling on Kubernetes; null keeps one replica.",
        None,
        example={"min_replicas": 1, "max_replicas": 4},
    )


def _request_rate(value: Any) -> Any:
    if value == "inf" or value == math.inf:
        return "inf"
    if isinstance(value, bool) or not isinstance(value, int | float):
        message = f"a request rate must be a number or inf, not {flow(value)}"
        raise fault(E0103, message, "request_rates: [1, 4, inf]")
    if not 0 < value < math.inf:
        message = f"a request rate must be above 0, not {flow(value)}"
        raise fault(E0105, message, "request_rates: [1, 4, inf]")
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
        "Request rates to measure; inf sends all requests at once.",
        [1, 4, 16, "inf"],
        unit="requests per second",
        min_length=1,
    )
    prompts: int = field("Requests per measurement.", 100, unit="requests", ge=1)


class Evaluate(Section):
    """What `serve/eval.sh` runs against the server."""

    tasks: Annotated[list[str], AfterValidator(distinct)] = field(
        "Names of tasks of lm-evaluation-harness (lm-eval).", [], example=["gsm8k"]
    )
    prompts: str | None = field(
        'A JSONL file of {"prompt": ..., "expected": ...} or {"messages": [...], "expected": ...}. '
        "expected is a Python regular expression that must match somewhere in the answer. A prompt is a user "
        "turn, or with data.format text or prompt_completion a text to continue. null has none.",
        None,
        min_length=1,
        example="prompts.jsonl",
    )
    num_generations: int = field("Answers sampled for each prompt of the file.", 1, unit="answers", ge=1)
    max_tokens: int = field("Largest length of an answer.", 512, unit="tokens", ge=1)
    limit: int | None = field(
        "Number of questions of each lm-eval task; null asks all.",
        None,
        unit="questions",
        ge=1,
        example=100,
    )
    temperature: float = field(
        "Sampling temperature for the prompts of the file; 0 always takes the likeliest token.",
        0.0,
        unit="none",
        ge=0,
        allow_inf_nan=False,
    )
