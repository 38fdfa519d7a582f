"""The tokenizer and chat template of a miniature checkpoint: byte-level BPE with the family's markers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

SIZE = 512

COMMON = ("<pad>", "<eos>", "<bos>", "<unk>")

HEADERS = ("<|start_header_id|>", "<|end_header_id|>")
CHATML = ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<unk>", "<think>", "</think>")

MARKERS = {
    "gemma2": (*COMMON, "<start_of_turn>", "<end_of_turn>"),
    "llama3": ("<|finetune_right_pad_id|>", "<|eot_id|>", "<|begin_of_text|>", "<unk>", *HEADERS),
    "qwen2": CHATML,
    "qwen3": CHATML,
    "gemma3": (
        *COMMON,
        "<start_of_turn>",
        "<end_of_turn>",
        "<start_of_image>",
        "<end_of_image>",
        "<image_soft_token>",
    ),
    "gemma4": (
        *COMMON,
        "<|turn>",
        "<turn|>",
        "<|image>",
        "<|image|>",
        "<image|>",
        "<|video|>",
        "<|audio>",
        "<|audio|>",
        "<audio|>",
        "<|channel>",
        "<channel|>",
        "<|think|>",
        "<|tool>",
        "<tool|>",
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_response>",
        "<tool_response|>",
    ),
}
"""Special tokens by family; a marker's place is its id. The first four pad, end a text, begin one, and stand
for what is unknown; Qwen begins a text with nothing, and its third begins a turn."""

WITHOUT_BOS = ("qwen2", "qwen3")

LLAMA_TEMPLATE = """\
{{ bos_token }}
{%- for message in messages -%}
    {{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif -%}
"""

CHATML_TEMPLATE = """\
{%- for message in messages -%}
    {{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""

GEMMA_TEMPLATE = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set prefix = '' -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') + message['content'] | trim }}
    {{- '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""

CHAT_TEMPLATES = {
    "llama3": LLAMA_TEMPLATE,
    "qwen2": CHATML_TEMPLATE,
    "qwen3": CHATML_TEMPLATE,
    "gemma2": GEMMA_TEMPLATE,
    "gemma3": GEMMA_TEMPLATE,
    "gemma4": """\
{{ bos_token }}
{%- for message in messages -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<|turn>' + role + '\\n' + message['content'] | trim + '<turn|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|turn>model\\n' }}
{%- endif -%}
""",
}

ROLES = ("system", "user", "model", "assistant")

SAMPLE = (
    "A recipe says how a model is trained, and the compiler writes what trains it.",
    "The quick brown fox jumps over the lazy dog while five boxing wizards watch from the hill.",
    "What is the capital of France? The capital of France is Paris, which lies on the river Seine.",
    "Add two and three, then multiply by seven: the answer is thirty-five, as anyone can check.",
    "Write a short poem about rain. Rain falls on the roof and sings, and the garden drinks it all.",
    "Merge the adapters into their base, shard by shard, and keep every other tensor as it was.",
    "Weights without training say nothing useful, though they multiply quite as fast as any others.",
    "Each morning a baker kneads the dough, waits an hour, shapes twelve loaves, and lights her oven.",
)


def write_tokenizer(directory: Path, family: str, texts: Sequence[str] = ()) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja, as transformers reads them.

    Args:
        directory: exists.
        family: a key of MARKERS.
        texts: what the merges are learnt from; SAMPLE when empty.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    pad, eos, bos, unknown = MARKERS[family][:4]
    tokenizer = Tokenizer(models.BPE(unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        min_frequency=1,
        special_tokens=list(MARKERS[family]),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # The role names are in every sample, so that they are learnt however few the texts are.
    tokenizer.train_from_iterator([*(texts or SAMPLE), *(f"{role}\n" for role in ROLES)], trainer)
    begins = family not in WITHOUT_BOS
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, 2)]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos if begins else None,
        "eos_token": eos,
        "pad_token": pad,
        "unk_token": unknown,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATES[family], encoding="utf-8")
