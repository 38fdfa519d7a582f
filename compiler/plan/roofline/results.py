"""What planning a server on paper finds out. Plain values, for printing and for JSON.

Bytes, FLOPs and seconds are those of one device; a replica of the model is split over `tensor_parallel`
devices. Nothing here was measured on a TPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ConfigDict, TypeAdapter


@dataclass(frozen=True)
class Weights:
    """Weights that are placed alike.

    Attributes:
        name: "attention", "keys and values", "MLP", ...
        number_bytes: of one number: 2 in bfloat16, 1 in eight bits.
        placed: "split over 8", "whole on each", ...
        bytes: on one device.
        read_bytes: of them, what a decode step reads; of experts, what is read when all of them are used.
        per_token: numbers on one device that every token is multiplied with.
        per_sample: the same for tokens that the output head sees alone.
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
    """The key/value cache of layers that are alike, or the states of gated delta nets.

    Attributes:
        name: "local", "global", "linear", or "all" where a model has one kind.
        layers: that store keys and values.
        shared: layers that read those of an earlier layer, and store none.
        window: tokens that the layers see, None for all.
        heads, head_dim: of the model.
        device_heads: heads that a device stores, those included that are copies of another device's.
        bytes_per_token: of all `layers`, as they lie in memory.
        unpadded_bytes_per_token: the same if each head were stored once and nothing were padded.
        read_bytes_per_token: what a decode step reads for each token that it sees, shared layers included.
        bytes_per_sequence: of states, however long the sequence is; a decode step reads and writes them.
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
class Step:
    """What handling tokens takes at least.

    Attributes:
        sequences: handled together.
        tokens: of each sequence: of the context that a decode step sees, or of the prompt.
        weight_bytes, cache_bytes: read; of layers with a window, the window's cache alone.
        whole_cache_bytes: read by the decode kernel's blocks, one that lies partly before a window
            whole; with vLLM-TPU's default sizes that is mostly the whole context.
        flops: of matrix products and attention.
        all_reduce_bytes: sent and received by two all-reduces in each layer.
        memory_seconds, compute_seconds, all_reduce_seconds: at the memory's bandwidth, the peak in bfloat16
            and the links' bandwidth.
        bound_seconds: the longest of the three, a lower bound.
        estimate_seconds: with the cache read by blocks, and the all-reduces after the rest, not beside it.
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
        concurrency: requests that are handled at once, over all replicas; as few as the lower bounds of
            their duration allow where the rate limits them.
        limited_by: "rate", "max_num_seqs", "cache" or "prompts".
        ttft_seconds: lower bound of the time to the first token, of a prompt that waits for nothing.
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
    """A published measurement of this very server beside what is planned.

    Attributes:
        what: "TTFT of 4,096 tokens in, 4 requests/s".
        unit: "GB" or "ms".
        published: the measurement.
        bound: the lower bound; for weights, what they come to.
        estimate: with nothing overlapped; None for weights.
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
        recipe: its name.
        model: its title.
        accelerator: described in a phrase.
        chips: of the accelerator.
        tensor_parallel, data_parallel: devices of a replica, and replicas.
        devices_per_chip: 2 on tpu7x, else 1.
        usd_per_hour: of the whole machine, None without a price.
        price_source: where it comes from; "" without a price.
        weights: by how they are placed; the vision tower is a line of its own where its size is known.
        weight_bytes: of all of them.
        caches: by kind of layer.
        cache_dtype: "float8_e4m3fn", ...
        cache_bytes_per_token: of all layers.
        windows_bound: whether layers with a window keep the window alone; else they keep every token.
        hbm_bytes: of a device.
        memory_share: of it that vLLM uses for weights and cache.
        cache_bytes: what is left for the cache; 0 when the weights take all.
        max_model_len, max_num_seqs: as in the recipe; the latter holds for each replica.
        tokens_fit: tokens of full-length sequences that a replica's cache holds.
        sequences_fit: sequences of max_model_len that a replica's cache holds at once.
        decode: lower bounds of a decode step, at the benchmark's input lengths as context.
        prefill: of a prompt alone, at the same lengths.
        loads: the benchmark's points.
        comparisons: to what was published; () where this is not the server that was measured.
        notes: sentences: what is assumed, and what is left out.
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
    cache_bytes: float
    max_model_len: int
    max_num_seqs: int
    tokens_fit: int
    sequences_fit: int
    decode: tuple[Step, ...]
    prefill: tuple[Step, ...]
    loads: tuple[Load, ...]
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...]


SERVING_PLAN: TypeAdapter[ServingPlan] = TypeAdapter(ServingPlan)
"""To and from JSON."""
