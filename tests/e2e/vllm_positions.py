"""Ask vLLM's own rule for the longest request of models. Run by an environment with vLLM.

It reads {name: config.json} from standard input, and writes {name: the largest max_model_len with which vLLM
starts}.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> int:
    from transformers import AutoConfig

    found = {}
    for name, config in json.load(sys.stdin).items():
        kind = config.pop("model_type")
        found[name] = longest(AutoConfig.for_model(kind, **config))
    json.dump(found, sys.stdout)
    return 0


def longest(config: Any) -> int:
    """Return the largest length that is accepted, by halving."""
    from vllm.config.model import _get_and_verify_max_len
    from vllm.transformers_utils.config import patch_rope_parameters
    from vllm.transformers_utils.model_arch_config_convertor import (
        MODEL_ARCH_CONFIG_CONVERTORS,
        ModelArchConfigConvertorBase,
    )

    text = config.get_text_config()
    patch_rope_parameters(text)
    convertor = MODEL_ARCH_CONFIG_CONVERTORS.get(config.model_type, ModelArchConfigConvertorBase)
    derived = convertor(config, text).derive_max_model_len_and_key()

    class Model:
        """The part of vLLM's description of a model that the rule reads."""

        derived_max_model_len_and_key = derived

    def accepts(length: int) -> bool:
        try:
            _get_and_verify_max_len(text, Model(), None, length, False, None)
        except ValueError:
            return False
        return True

    low, high = 1, 2**31
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if accepts(middle) else (low, middle - 1)
    return low


if __name__ == "__main__":
    sys.exit(main())
