"""The values of options that few recipes set; settings.py has those of every recipe."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FakeQuantization:
    """Quantization-aware training, which rounds the operands of products (runtime.model.quantize).

    Attributes:
        weights: "int4", "int4_asymmetric" or "mxfp4".
        activations: "int8", "mxfp4", or None for none.
        group_size: inputs of an output whose weights share a scale.
        head: whether the output head is rounded too.
        start_step: optimizer steps before the first one that rounds.
    """

    weights: str
    activations: str | None
    group_size: int
    head: bool = False
    start_step: int = 0


@dataclass(frozen=True)
class EarlyStopping:
    """When a run ends before its last step.

    Attributes:
        patience: consecutive evaluations without progress before the run ends.
        min_delta: progress means a loss lower than the previous minimum by more than this.
    """

    patience: int
    min_delta: float = 0.0


@dataclass(frozen=True)
class SampleSettings:
    """Prompts that are answered at each evaluation.

    Attributes:
        prompts: a file of prompts; its path is like those of data.
        max_tokens: maximum tokens of an answer.
    """

    prompts: str
    max_tokens: int = 64


@dataclass(frozen=True)
class LocalCheckpointSettings:
    """Checkpoints on each host's own disk, in addition to the shared ones.

    Attributes:
        directory: an absolute path on every host.
        every_steps: optimizer steps between them.
    """

    directory: str
    every_steps: int
