"""OLMo 3: OLMo 2's layers; three of four have a window, and their rotary frequencies are not scaled.

transformers 5.0 to 5.12 scale the frequencies of layers with a window too. Earlier versions, 5.13 and later,
and vLLM leave them as the model was trained (github.com/huggingface/transformers/pull/45945).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..rope import Rope
from .base import FULL, SLIDING, integer, section
from .olmo2 import Olmo2

PERIOD = 4


class Olmo3(Olmo2):
    name = "olmo3"
    title = "OLMo 3"
    model_types = ("olmo3",)
    defaults: ClassVar[Mapping[str, Any]] = {**Olmo2.defaults, "sliding_window": 4096}

    def ropes(self, config: Mapping[str, Any], kinds: Sequence[str], head_dim: int) -> Mapping[str, Rope]:
        ropes = dict(super().ropes(config, kinds, head_dim))
        if SLIDING in ropes and not isinstance(section(config, "rope_parameters").get(SLIDING), Mapping):
            ropes[SLIDING] = Rope(ropes[SLIDING].theta)
        return ropes

    def layer_types(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        if config.get("layer_types") is not None:
            return super().layer_types(config)
        layers = integer(config, "num_hidden_layers")
        return tuple(SLIDING if (i + 1) % PERIOD else FULL for i in range(layers))


FAMILY = Olmo3()
