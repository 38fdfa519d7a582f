"""What one compile of the serving step is given, and what it answers.

The worker (worker.py) runs where this project is not installed: it reads and writes the same as JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter

from recipec.compiler.plan.results import Collective, Timeline


@dataclass(frozen=True)
class Bucket:
    """One shape of the server's step: it pads each step's tokens to the next of its buckets.

    Attributes:
        kind: what the bucket stands for; the program is the same for both.
        tokens: of the step, on one replica.
    """

    kind: Literal["decode", "prefill"]
    tokens: int


@dataclass(frozen=True)
class ServeJob:
    """One replica's step, to be compiled.

    Attributes:
        config: config.json of the whole model, complete enough for transformers.
        model_layers: of the whole model.
        layers: depths to compile, in ascending order.
        generation: of the chips: "v6e".
        chip, kernel_version: what tpu-inference calls one, and the number that its kernels know it by.
        topology: of one replica, as libtpu names it: "v6e:2x4".
        tensor_parallel: devices of one replica.
        kv_cache_dtype: as vLLM's flag takes it.
        max_model_len, max_num_seqs, max_num_batched_tokens: as vLLM's flags; of one replica.
        buckets: which steps to compile.
        pages: of the key/value cache; None for as many as the server would allocate.
        page_tokens: tokens of a page; None for the server's own choice.
        hbm_bytes: of a device.
        memory_share: the part of it that vLLM uses.
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
    """One compiled program, of one device. Bytes unless it is said otherwise.

    Attributes:
        kind: "decode", "prefill", or "head" (the final logits of max_num_seqs tokens).
        tokens: of the step.
        arguments: weights and key/value cache, and little else.
        temporaries, code: as in Compiled.
        outputs: what is written beside the cache, which is updated in place.
        timeline: of the step, without its attention kernels.
        collectives: by kind, all over the devices of the replica.
        kernels: how often each attention kernel runs; its name tells its block sizes.
        refusal: what the compiler said when the program does not fit; then figures are 0.
        seconds: that it took on this machine.
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
    """What was compiled at one depth.

    Attributes:
        layers: decoder layers.
        weights: bytes of a device.
        page: bytes of a device that one page of the cache takes, all layers together.
        programs: in the order of the job's buckets.
    """

    layers: int
    weights: float
    page: float
    programs: tuple[ServeProgram, ...]


@dataclass(frozen=True)
class ServeAnswer:
    """What a worker found.

    Attributes:
        page_tokens: of a page of the cache.
        pages: that the cache has.
        token_bytes: of the cache on one device, for a token in one layer, by the layer's type.
        depths: as the job's layers.
        head: the program that makes the logits; its size does not hang on the depth.
        peak_rss: bytes of this machine's memory.
        seconds: that it all took on this machine.
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
