"""The results of planning a server on paper, as plain values for printing and for JSON.

Bytes, FLOPs and seconds are for one device. A replica of the model is split over `tensor_parallel` devices.
Nothing here is measured on a TPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ConfigDict, TypeAdapter


@dataclass(frozen=True)
class Weights:
    """Weights with the same kind, type and placement.

    Attributes:
        name: "attention", "keys and values", "MLP", ...
        number_bytes: bytes of one number: 2 in bfloat16, 1 in eight bits.
        placed: "split over 8", "whole on each", ...
        bytes: bytes on one device.
        read_bytes: the part of `bytes` that a decode step reads; for experts, when all of them are used.
        per_token: numbers on one device that every token is multiplied with.
        per_sample: numbers on one device that only tokens at the output head are multiplied with.
    """

    name: str
    number_bytes: int
    placed: str
    bytes: float
    read_bytes: float
    per_token: float
    per_sample: float


@dataclass(frozen=True)
class Cache:
    """The key/value cache of layers of one kind, or the states of gated delta nets or Mamba mixers.

    Attributes:
        name: "local", "global", "linear", "latent", or "all" where a model has one kind.
        layers: number of layers that store keys and values.
        shared: number of layers that read those of an earlier layer, and store none.
        window: tokens that the layers see, None for all.
        heads, head_dim: key/value heads of the model, and their size.
        device_heads: heads that a device stores, including copies of another device's heads.
        bytes_per_token: bytes of all `layers` in memory, padding included.
        unpadded_bytes_per_token: the same if each head were stored once and without padding.
        read_bytes_per_token: bytes that a decode step reads for each token that it sees, in all layers.
        bytes_per_sequence: bytes of the states, for any length. A decode step reads and writes them.
    """

    name: str
    layers: int
    shared: int
    window: int | None
    heads: int
    head_dim: int
    device_heads: int
    bytes_per_token: float
    unpadded_bytes_per_token: float
    read_bytes_per_token: float
    bytes_per_sequence: float = 0.0


@dataclass(frozen=True)
class StepBounds:
    """Lower bounds and an estimate of one step: a decode step, or a prompt's prefill.

    Attributes:
        sequences: sequences that are handled together.
        tokens: tokens of each sequence: of the context that a decode step sees, or of the prompt.
        weight_bytes, cache_bytes: bytes that are read. For layers with a window, only the window's cache.
        whole_cache_bytes: bytes of the cache that the decode kernel reads in blocks. It reads a block that
            is partly before a window as a whole. With vLLM-TPU's default sizes, that is mostly the whole
            context.
        flops: FLOPs of matrix products and attention.
        all_reduce_bytes: bytes sent and received by two all-reduces in each layer.
        memory_seconds, compute_seconds, all_reduce_seconds: times at the memory's bandwidth, the peak in
            bfloat16, and the links' bandwidth.
        bound_seconds: the longest of the three, a lower bound.
        estimate_seconds: the time if the cache is read in blocks, and no all-reduce overlaps other work.
    """

    sequences: float
    tokens: float
    weight_bytes: float
    cache_bytes: float
    whole_cache_bytes: float
    flops: float
    all_reduce_bytes: float
    memory_seconds: float
    compute_seconds: float
    all_reduce_seconds: float
    bound_seconds: float
    estimate_seconds: float


@dataclass(frozen=True)
class Load:
    """One of the benchmark's points.

    Attributes:
        input_length, output_length: tokens of each request.
        request_rate: requests per second over all replicas, None when all are sent at once.
        concurrency: requests that are handled at once, over all replicas. If the rate limits them, this
            follows from the lower bounds of their duration.
        limited_by: "rate", "max_num_seqs", "cache" or "prompts".
        ttft_seconds: lower bound of the time to the first token, for a prompt that does not wait.
        tpot_seconds: lower bound of the time per further token.
        tokens_per_second: upper bound of the output over all replicas.
        usd_per_million_tokens: lower bound for output tokens, None without a price.
    """

    input_length: int
    output_length: int
    request_rate: float | None
    concurrency: float
    limited_by: str
    ttft_seconds: float
    tpot_seconds: float
    tokens_per_second: float
    usd_per_million_tokens: float | None


@dataclass(frozen=True)
class Comparison:
    """A published measurement of the same server, with the planned value.

    Attributes:
        what: "TTFT of 4,096 tokens in, 4 requests/s".
        unit: "GB" or "ms".
        published: the measurement.
        bound: the lower bound; for weights, their planned size.
        estimate: the estimate without overlap; None for weights.
    """

    what: str
    unit: str
    published: float
    bound: float
    estimate: float | None


@dataclass(frozen=True)
class ServingPlan:
    """A recipe's server, planned on paper.

    Attributes:
        accelerator: a phrase that describes the accelerator.
        tensor_parallel, data_parallel: devices of a replica, and replicas.
        devices_per_chip: 2 on tpu7x, else 1.
        usd_per_hour: price of the whole machine, None without a price.
        price_source: where the price comes from; "" without a price.
        weights: weights by kind and placement. The vision tower is an entry of its own if its size is known.
        cache_dtype: "float8_e4m3fn", ...
        cache_bytes_per_token: bytes of all layers.
        windows_bound: whether layers with a window keep only the window. Otherwise they keep every token.
        hbm_bytes: HBM of a device.
        memory_share: share of the HBM that vLLM uses for weights and cache.
        state_bytes: bytes set aside for states of gated delta nets or Mamba mixers; 0 without a pool.
        cache_bytes: bytes left for the cache; 0 when the weights take all.
        max_model_len, max_num_seqs: as in the recipe; max_num_seqs holds for each replica.
        tokens_fit: tokens of full-length sequences that a replica's cache holds.
        sequences_fit: sequences of max_model_len that a replica's cache holds at once.
        decode: lower bounds of a decode step, with the benchmark's input lengths as context.
        prefill: lower bounds of a prompt alone, at the same lengths.
        loads: the benchmark's points.
        comparisons: comparisons with published figures; () if no figures of this server are published.
        notes: sentences about assumptions and omissions.
    """

    __pydantic_config__ = ConfigDict(defer_build=True)  # few commands read or write it

    recipe: str
    model: str
    accelerator: str
    chips: int
    tensor_parallel: int
    data_parallel: int
    devices_per_chip: int
    usd_per_hour: float | None
    price_source: str
    weights: tuple[Weights, ...]
    weight_bytes: float
    caches: tuple[Cache, ...]
    cache_dtype: str
    cache_bytes_per_token: float
    windows_bound: bool
    hbm_bytes: float
    memory_share: float
    state_bytes: float
    cache_bytes: float
    max_model_len: int
    max_num_seqs: int
    tokens_fit: int
    sequences_fit: int
    decode: tuple[StepBounds, ...]
    prefill: tuple[StepBounds, ...]
    loads: tuple[Load, ...]
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...]


SERVING_PLAN: TypeAdapter[ServingPlan] = TypeAdapter(ServingPlan)
"""To and from JSON."""
