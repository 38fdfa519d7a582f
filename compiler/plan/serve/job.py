"""The job of one compile of the serving step, and its answer.

The worker (worker.py) runs where this project is not installed. It reads and writes these values as JSON.
"""

from __future__ import annotations

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
