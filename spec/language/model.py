"""The `model` section: which checkpoint, and how it computes."""

from __future__ import annotations

from typing import Literal

from spec.language.base import Section, field


class Model(Section):
    """The checkpoint to fine-tune, and how the model computes."""

    id: str = field(
        "The model: a Hugging Face id, a gs:// address, or a directory, which starts with ./, / or ~ and is "
        "relative to the recipe's folder.",
        min_length=1,
        example="google/gemma-4-31B-it",
    )
    revision: str | None = field(
        "Branch, tag or commit of the Hugging Face repository; null takes its main branch.",
        None,
        min_length=1,
    )
    dtype: Literal["bfloat16", "float32"] = field(
        "Type of the base weights and of the computation.", "bfloat16"
    )
    attention: Literal["dot", "splash"] = field(
        "Attention: dot computes all scores, splash is the TPU's fused kernel.", "dot"
    )
    tokenizer: str | None = field(
        "Another tokenizer, as an id or a directory; null takes the model's.", None, min_length=1
    )
