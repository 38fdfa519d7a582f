"""Write compiler/data/causal_models.json: what the pinned transformers has of causal models, by model_type.

    .venv/bin/python -m scripts.causal_models > compiler/data/causal_models.json

It reads transformers' classes and their source, and computes nothing. `packed` lists models whose decoder is
under "model.", with a list named `layers`. For each, it says whether samples that share a row stay separate.
For that, every layer has to be attention under a mask of transformers that is made from positions.
`positions` has the positions that a config class gives where config.json does not say them, for these models
and for those of the families.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterable
from typing import Any

from recipec.runtime.model.families import FAMILIES

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
    defaults = positions(transformers, packed)
    return {"transformers": transformers.__version__, "packed": packed, "positions": defaults}


def positions(transformers: Any, kinds: Iterable[str]) -> dict[str, int]:
    """Return the default positions of model types and of the families' types, where there are any."""
    described = {kind for family in FAMILIES.values() for kind in family.model_types}
    defaults = {kind: _positions(transformers, kind) for kind in sorted({*described, *kinds})}
    return {kind: number for kind, number in defaults.items() if number is not None}


def _packs(model: Any, name: str, source: str) -> bool:
    decoder = getattr(sys.modules[model.__module__], name.removesuffix("ForCausalLM") + "Model", None)
    takes = decoder is not None and "position_ids" in inspect.signature(decoder.forward).parameters
    masked = "create_causal_mask" in source
    return bool(takes and masked and not model._is_stateful and not STATES.search(source))


def _positions(transformers: Any, kind: str) -> int | None:
    """Return the class's own max_position_embeddings; None for a class without a default or without them."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        text = transformers.CONFIG_MAPPING[kind]().get_text_config()
    except StrictDataclassError:  # a config of several models has no default
        return None
    default = getattr(text, "max_position_embeddings", None)
    return default if isinstance(default, int) else None


if __name__ == "__main__":
    sys.exit(main())
