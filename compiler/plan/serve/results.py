"""What planning a server by compiling its step finds out. Plain values, for printing and for JSON.

Bytes are those of one device, and seconds those of a replica's step. Nothing here was measured on a TPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import TypeAdapter

from recipec.compiler.plan.serve.job import ServeProgram


@dataclass(frozen=True)
class ServingPoint:
    """A point of the recipe's benchmark, estimated.

    Attributes:
        input_length, output_length: tokens of each request.
        request_rate: a second over all replicas, None for all requests at once.
        concurrency: requests that are answered at a time, over all replicas.
        ttft: seconds that a prompt takes by itself, without waiting for others.
        tpot: seconds between an answer's tokens, with the prompts that are taken in meanwhile.
        tokens_per_second: of answers, over all replicas.
        saturated: whether requests come faster than they are answered.
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
    """A server, planned by compiling its step.

    Attributes:
        recipe, model, accelerator: by name.
        topology: of one replica: "v6e:2x4".
        tensor_parallel, data_parallel: devices of a replica, and replicas.
        kv_cache_dtype: as vLLM's flag takes it.
        decode_blocks: of RPA_V3_DECODE_BLOCK_SIZES, None for the kernel's own choice.
        layers, compiled_layers: of the model, and the depths that were compiled.
        weights: bytes.
        cache: bytes of the key/value cache.
        cache_tokens, page_tokens: of one replica's cache, and of a page.
        programs: of the whole model: decode, prefill, head.
        used, available: HBM of the largest program with its arguments, and what a device has.
        refusal: what the compiler said when a program did not fit.
        points: of the recipe's benchmark; () where it does not fit.
        decode_alone, decode_full: seconds of a step with one sequence of the benchmark's shortest context,
            and with max_num_seqs (or as many as the cache holds) of the longest.
        published: sentences that hold the estimates against published figures, where there are any.
        versions: of what was compiled.
        notes: sentences.
        compile_seconds: of this machine.
        peak_rss: bytes of this machine's memory.
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
        """Tokens per second at the most: the geometric mean over the benchmark's input lengths, so that each
        counts the same; 0 where it does not fit."""
        most: dict[int, float] = {}
        for point in self.points:
            most[point.input_length] = max(point.tokens_per_second, most.get(point.input_length, 0.0))
        return math.prod(most.values()) ** (1 / len(most)) if most else 0.0


@dataclass(frozen=True)
class ServingCandidate:
    """One configuration of a search.

    Attributes:
        sets: what it changes in the recipe, as --set takes it; () for the recipe as it is.
        tensor_parallel, data_parallel, kv_cache_dtype, decode_blocks: what it is.
        status: "compiled", "too large", "refused" (by the head counts or the weights' size) or "failed".
        reason: why there is no estimate, "" where there is one.
        serving: None where nothing was compiled.
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
    """What a search over serving configurations found.

    Attributes:
        candidates: in the order in which they were looked at; the recipe as it is comes first.
        best: index of the one with the highest throughput, None where none fits.
    """

    candidates: tuple[ServingCandidate, ...]
    best: int | None


COMPILED_SERVING: TypeAdapter[CompiledServing] = TypeAdapter(CompiledServing)
SERVING_SEARCH: TypeAdapter[ServingSearch] = TypeAdapter(ServingSearch)
