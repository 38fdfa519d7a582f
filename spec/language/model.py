"""The `model` section: which checkpoint, and how it computes."""

from __future__ import annotations

from typing import Literal

from recipec.spec.language.base import Section, field


class Model(Section):
    """The checkpoint to fine-tune, and how the model computes."""

    id: str = field(
        "The model: a Hugging Face id, of the catalogue or added by `recipe models add`; or a directory, "
        "which starts with ./, / or ~ and is relative to the recipe's folder. Weights in a bucket are what "
        "train.py and merge.py are given by --model.",
        min_length=1,
        example="google/gemma-4-31B-it",
    )
    revision: str | None = field(
        "Branch, tag or commit of the Hugging Face repository; null takes the commit that the model was "
        "added at, else its main branch.",
        None,
        min_length=1,
        example="main",
    )
    dtype: Literal["bfloat16", "float32"] = field(
        "Type of the base weights and of the computation.",
        "bfloat16",
        choices={
            "bfloat16": "16 bits a number; what TPUs multiply in.",
            "float32": "32 bits a number: twice the memory; for comparisons on a CPU.",
        },
    )
    attention: Literal["dot", "splash"] = field(
        "Attention: dot computes all scores, splash is the TPU's fused kernel.",
        "dot",
        choices={
            "dot": "All scores are computed and stored, with memory in the square of max_length.",
            "splash": "The TPU's fused kernel, with memory in proportion to max_length; TPUs alone have it.",
        },
    )
    attention_block: Literal[128, 256, 512, 1024, 2048] | None = field(
        "Tokens of a block of splash attention at the most; null takes the accelerator's: 1024 on v6e and "
        "TPU7x, 512 on others. Rows that would be lengthened by more than an eighth have smaller ones.",
        None,
        unit="tokens",
        example=1024,
        choices={
            "128": "As the shortest rows have it.",
            "256": "As rows have it to which 512 would add too much.",
            "512": "What v4, v5e and v5p have by default.",
            "1024": "What v6e and TPU7x have by default: less time there, by published timings.",
            "2048": "What published timings have for rows of 8,192 tokens and more; it needs the most VMEM.",
        },
    )
    add_tokens: dict[str, str | None] = field(
        "Special tokens that the tokenizer gets: each one's text, and the token in whose place it comes, "
        "such as one that the checkpoint holds in reserve; null gives it a row of the embedding that no "
        "token has. The merged model's tokenizer has them.",
        {},
        example={"<|im_start|>": "<|reserved_special_token_0|>", "<|im_end|>": None},
    )
    vocab_size: int | None = field(
        "Rows of the embedding and of the head. Those that the checkpoint does not have are added, each as "
        "the mean of its own; null keeps the checkpoint's.",
        None,
        unit="tokens",
        ge=1,
        le=16_777_216,
        example=128_320,
    )
    tokenizer: str | None = field(
        "Another tokenizer, as an id or a directory; null takes the model's.",
        None,
        min_length=1,
        example="google/gemma-4-31B-it",
    )
