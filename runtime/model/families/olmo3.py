"""OLMo 3: OLMo 2's layers; three of four have a window, and their rotary frequencies are not scaled.

transformers 5.0 to 5.12 scale the frequencies of layers with a window too. Earlier versions, 5.13 and later,
and vLLM leave them as the model was trained (github.com/huggingface/transformers/pull/45945).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..rope import Rope
from .family import SLIDING, section
from .olmo2 import Olmo2


class Olmo3(Olmo2):
    name = "olmo3"
    title = "OLMo 3"
    defaults: ClassVar[Mapping[str, Any]] = {**Olmo2.defaults, "sliding_window": 4096}
    full_every = 4

    def ropes(self, config: Mapping[str, Any], kinds: Sequence[str], head_dim: int) -> Mapping[str, Rope]:
        ropes = dict(super().ropes(config, kinds, head_dim))
        if SLIDING in ropes and not isinstance(section(config, "rope_parameters").get(SLIDING), Mapping):
            ropes[SLIDING] = Rope(ropes[SLIDING].theta)
        return ropes


FAMILY = Olmo3()
