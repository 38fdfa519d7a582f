"""The job and the results of planning a server by compiling its step, as plain values and as JSON.

The worker (server_worker.py) runs where this project is not installed, and reads and writes JSON. Bytes are
for one device, and seconds are for a replica's step. Nothing here is measured on a TPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter

from recipec.compiler.plan.results import Collective, Timeline


@dataclass(frozen=True)
class Bucket:
    """One shape of the server's step. The server pads the tokens of each step to the next bucket.

    Attributes:
        kind: the use of the bucket; the program is the same for both kinds.
        tokens: tokens of the step on one replica.
    """

    kind: Literal["decode", "prefill"]
    tokens: int


@dataclass(frozen=True)
class ServeJob:
    """The compile of one replica's step.

    Attributes:
        config: config.json of the whole model, complete enough for transformers.
        model_layers: number of layers of the whole model.
        layers: depths to compile, in ascending order.
        generation: generation of the chips: "v6e".
        chip, kernel_version: tpu-inference's name of the chip, and its kernels' version number of it.
        topology: topology of one replica, as libtpu names it: "v6e:2x4".
        tensor_parallel: devices of one replica.
        kv_cache_dtype: as vLLM's flag takes it.
        max_model_len, max_num_seqs, max_num_batched_tokens: vLLM's flags, for one replica.
        buckets: the steps to compile.
        pages: pages of the key/value cache; None for as many as the server would allocate.
        page_tokens: tokens of a page; None for the server's own choice.
        hbm_bytes: HBM of a device.
        memory_share: the share of the HBM that vLLM uses.
        environment: environment variables of the server.
    """

    config: dict[str, Any]
    model_layers: int
    layers: tuple[int, ...]
    generation: str
    chip: str
    kernel_version: int
    topology: str
    tensor_parallel: int
    kv_cache_dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    buckets: tuple[Bucket, ...]
    hbm_bytes: float
    memory_share: float
    pages: int | None = None
    page_tokens: int | None = None
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class ServeProgram:
    """The figures of one compiled program on one device.

    Attributes:
        kind: "decode", "prefill", or "head" (the final logits of max_num_seqs tokens).
        tokens: tokens of the step.
        arguments: bytes of the arguments, mostly weights and key/value cache.
        temporaries, code: bytes, as in Compiled.
        outputs: bytes of outputs, without the cache, which is updated in place.
        timeline: timeline of the step, without its attention kernels.
        collectives: by kind, all over the devices of the replica.
        kernels: how often each attention kernel runs, by its name, which has its block sizes.
        refusal: the compiler's message if the program does not fit; then the figures are 0.
        seconds: time of tracing and compiling on this machine.
    """

    kind: str
    tokens: int
    arguments: float = 0.0
    temporaries: float = 0.0
    code: float = 0.0
    outputs: float = 0.0
    timeline: Timeline = field(default_factory=Timeline)
    collectives: tuple[Collective, ...] = ()
    kernels: tuple[tuple[str, float], ...] = ()
    refusal: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class ServeDepth:
    """The programs that were compiled at one depth.

    Attributes:
        layers: number of decoder layers.
        weights: bytes of the weights on a device.
        page: bytes that one page of the cache takes on a device, all layers together.
        programs: the programs, in the order of the job's buckets.
    """

    layers: int
    weights: float
    page: float
    programs: tuple[ServeProgram, ...]


@dataclass(frozen=True)
class ServeAnswer:
    """A worker's answer.

    Attributes:
        page_tokens: tokens of a page of the cache.
        pages: number of pages of the cache.
        token_bytes: bytes of the cache on one device for a token in one layer, by the layer's type.
        depths: one entry for each depth in the job's `layers`.
        head: the program that computes the logits. Its size does not depend on the depth.
        peak_rss: the worker's peak memory on this machine, bytes.
        seconds: time of the whole job on this machine.
    """

    page_tokens: int
    pages: int
    token_bytes: dict[str, float]
    depths: tuple[ServeDepth, ...]
    head: ServeProgram
    peak_rss: float
    seconds: float


JOB: TypeAdapter[ServeJob] = TypeAdapter(ServeJob)
ANSWER: TypeAdapter[ServeAnswer] = TypeAdapter(ServeAnswer)


@dataclass(frozen=True)
class ServingPoint:
    """The estimate of a point of the recipe's benchmark.

    Attributes:
        input_length, output_length: tokens of each request.
        request_rate: requests a second over all replicas, None for all requests at once.
        concurrency: requests that are handled at once, over all replicas.
        ttft: seconds to the first token of a prompt that does not wait for others.
        tpot: seconds between an answer's tokens, including the prefill of other prompts.
        tokens_per_second: output tokens a second over all replicas.
        saturated: whether requests arrive faster than they are answered.
    """

    input_length: int
    output_length: int
    request_rate: float | None
    concurrency: float
    ttft: float
    tpot: float
    tokens_per_second: float
    saturated: bool


@dataclass(frozen=True)
class CompiledServing:
    """The plan of a server that was made by compiling its step.

    Attributes:
        topology: topology of one replica: "v6e:2x4".
        tensor_parallel, data_parallel: devices of a replica, and replicas.
        kv_cache_dtype: as vLLM's flag takes it.
        decode_blocks: value of RPA_V3_DECODE_BLOCK_SIZES, None for the kernel's own choice.
        layers, compiled_layers: layers of the model, and the depths that were compiled.
        weights: bytes of the weights.
        cache: bytes of the key/value cache.
        cache_tokens, page_tokens: tokens of one replica's cache, and of a page.
        programs: programs of the whole model: decode, prefill, head.
        used, available: HBM that the programs need with their arguments, and HBM of a device.
        refusal: the compiler's message when a program did not fit, else None.
        points: the points of the recipe's benchmark; () where it does not fit.
        decode_alone, decode_full: seconds of a step with one sequence of the benchmark's shortest context,
            and with max_num_seqs (or as many as the cache holds) of the longest.
        published: sentences that compare the estimates with published figures, if there are any.
        versions: versions of the packages that were compiled.
        compile_seconds: time of compiling on this machine.
        peak_rss: the worker's peak memory on this machine, bytes.
    """

    recipe: str
    model: str
    accelerator: str
    topology: str
    tensor_parallel: int
    data_parallel: int
    kv_cache_dtype: str
    decode_blocks: str | None
    layers: int
    compiled_layers: tuple[int, ...]
    weights: float
    cache: float
    cache_tokens: int
    page_tokens: int
    programs: tuple[ServeProgram, ...]
    used: float
    available: float
    refusal: str | None
    points: tuple[ServingPoint, ...]
    decode_alone: float
    decode_full: float
    published: tuple[str, ...]
    versions: dict[str, str]
    notes: tuple[str, ...]
    compile_seconds: float
    peak_rss: float

    @property
    def fits(self) -> bool:
        return self.refusal is None and self.used <= self.available

    @property
    def throughput(self) -> float:
        """The highest tokens per second, as the geometric mean over the benchmark's input lengths.

        The mean gives each input length the same weight. The value is 0 where the server does not fit.
        """
        most: dict[int, float] = {}
        for point in self.points:
            most[point.input_length] = max(point.tokens_per_second, most.get(point.input_length, 0.0))
        return math.prod(most.values()) ** (1 / len(most)) if most else 0.0


@dataclass(frozen=True)
class ServingCandidate:
    """One configuration of a search.

    Attributes:
        sets: its changes of the recipe as --set arguments; () for the unchanged recipe.
        tensor_parallel, data_parallel, kv_cache_dtype, decode_blocks: its settings, as in `CompiledServing`.
        status: "compiled", "too large", "refused" (ruled out on paper) or "failed".
        reason: why there is no estimate, "" where there is one.
        serving: its plan; None where nothing was compiled.
    """

    sets: tuple[str, ...]
    tensor_parallel: int
    data_parallel: int
    kv_cache_dtype: str
    decode_blocks: str | None
    status: str
    reason: str = ""
    serving: CompiledServing | None = None


@dataclass(frozen=True)
class ServingSearch:
    """The result of a search over serving configurations.

    Attributes:
        candidates: configurations in the order of the search, the unchanged recipe first.
        best: index of the configuration with the highest throughput, None where none fits.
    """

    candidates: tuple[ServingCandidate, ...]
    best: int | None


COMPILED_SERVING: TypeAdapter[CompiledServing] = TypeAdapter(CompiledServing)
SERVING_SEARCH: TypeAdapter[ServingSearch] = TypeAdapter(ServingSearch)
