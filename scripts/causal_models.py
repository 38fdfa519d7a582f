"""Write compiler/data/causal_models.json: the causal models of the pinned transformers, by model_type.

    .venv/bin/python scripts/causal_models.py > compiler/data/causal_models.json

It reads transformers' classes and their source, and computes nothing. It lists models whose decoder is under
"model.", with a list named `layers`. For each, it says whether samples that share a row stay separate. For
that, every layer has to be attention under a mask of transformers that is made from positions.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from typing import Any

STATES = re.compile(r"nn\.Conv1d|A_log|dt_bias|recurrent_state|alibi")
"""Text in the source of a model whose layers use earlier tokens without the mask."""


def main() -> int:
    import transformers

    sys.stdout.write(json.dumps(table(transformers), indent=1) + "\n")
    return 0


def table(transformers: Any) -> dict[str, Any]:
    """Return the contents of the file as plain values."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    packed = {}
    for kind, name in sorted(NAMES.items()):
        model = getattr(transformers, name)
        source = inspect.getsource(sys.modules[model.__module__])
        lists = model.base_model_prefix == "model" and "self.layers = nn.ModuleList" in source
        if lists and name.endswith("ForCausalLM") and "EncoderLayer" not in source:
            packed[kind] = _packs(model, name, source)
    return {"transformers": transformers.__version__, "packed": packed}


def _packs(model: Any, name: str, source: str) -> bool:
    decoder = getattr(sys.modules[model.__module__], name.removesuffix("ForCausalLM") + "Model", None)
    takes = decoder is not None and "position_ids" in inspect.signature(decoder.forward).parameters
    masked = "create_causal_mask" in source
    return bool(takes and masked and not model._is_stateful and not STATES.search(source))


if __name__ == "__main__":
    sys.exit(main())
