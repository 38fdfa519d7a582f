"""The `model` section: which checkpoint, and how it computes."""

from __future__ import annotations

from typing import Literal

from recipec.spec.language.section import Section, field


class Model(Section):
    """The checkpoint to fine-tune, and how the model computes."""

    id: str = field(
        "The model: a Hugging Face id from the catalog or added with `recipe models add`; or a directory, "
        "which starts with ./, / or ~ and is relative to the recipe's folder. For weights in a bucket, pass "
        "their address to train.py and merge.py with --model.",
        min_length=1,
        example="google/gemma-4-31B-it",
    )
    revision: str | None = field(
        "Branch, tag or commit of the Hugging Face repository; null uses the commit at which the model was "
        "added, or otherwise the main branch.",
        None,
        min_length=1,
        example="main",
    )
    dtype: Literal["bfloat16", "float32"] = field(
        "Type of the base weights and of the computation.",
        "bfloat16",
        choices={
            "bfloat16": "16 bits a number; the type in which TPUs multiply.",
            "float32": "32 bits a number: twice the memory, for comparisons on a CPU.",
        },
    )
    quantization: Literal["nf4", "int8", "fp8"] | None = field(
        "Quantization of the frozen base weights of linear layers and experts, on which adapters are trained "
        "(QLoRA); null keeps dtype. merge.quantization is that of the merged weights.",
        None,
        example="nf4",
        choices={
            "nf4": "4 bits a number, with a scale for each 64 inputs.",
            "int8": "8 bits a number, with a scale for each output.",
            "fp8": "8 bits a number in floating point (float8_e4m3fn), with a scale for each output.",
        },
    )
    quantized_matmul: Literal["forward", "both"] | None = field(
        "Multiply the frozen weights in the eight bits in which they are stored, with activations rounded "
        "row by row. This is faster on chips with eight-bit products, and less exact. null multiplies in "
        "dtype. Only with quantization: int8 or fp8.",
        None,
        example="forward",
        choices={
            "forward": "In the forward pass; the gradient of the activations is computed in dtype.",
            "both": "In the forward pass and for the gradient of the activations.",
        },
    )
    attention: Literal["auto", "dot", "splash"] = field(
        "Attention: dot computes all scores, splash is the TPU's fused kernel. auto takes splash where it "
        "runs.",
        "auto",
        choices={
            "auto": "splash on a TPU in bfloat16. dot on a CPU, in float32, and for a model that no family "
            "describes.",
            "dot": "Compute and store all scores; memory grows with the square of max_length.",
            "splash": "The TPU's fused kernel; memory grows in proportion to max_length. It needs a TPU.",
        },
    )
    attention_block: Literal[128, 256, 512, 1024, 2048] | None = field(
        "Largest block of splash attention; null uses the accelerator's: 512 on v4 and v5p, and on v5e for "
        "models with windows, 1024 otherwise. If this would lengthen rows by more than an eighth, smaller "
        "blocks are used.",
        None,
        unit="tokens",
        example=1024,
        choices={
            "128": "For the shortest rows.",
            "256": "For rows to which 512 would add too much padding.",
            "512": "The default of v4, v5e and v5p.",
            "1024": "The default of v6e and TPU7x, where published timings show it to be faster.",
            "2048": "Used in published timings for rows of 8,192 tokens and more; needs the most VMEM.",
        },
    )
    add_tokens: dict[str, str | None] = field(
        "Special tokens to add to the tokenizer: maps the text of each to the token that it replaces, such "
        "as a reserved token of the checkpoint. null uses an embedding row that no token uses. The tokenizer "
        "of the merged model has the new tokens.",
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
        "Another tokenizer, as an id or a directory; null uses the model's.",
        None,
        min_length=1,
        example="google/gemma-4-31B-it",
    )
