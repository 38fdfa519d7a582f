"""What the compiler knows about a model family, besides its arrays.

Most of it follows from the family's module in runtime/model/families/ and from the checkpoint's config.json.
ROWS holds the exceptions; a new family needs no entry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any

from recipec.runtime.model.families import FAMILIES, family_of
from recipec.runtime.model.families.family import CHATML, Family, text_config
from recipec.runtime.model.families.transformers import Transformers

COMMON = ("<pad>", "<eos>", "<bos>", "<unk>")
GEMMA = (*COMMON, "<start_of_turn>", "<end_of_turn>")

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

TEMPLATE = """\
{%- for message in messages -%}
    {{ '<begin>' + message['role'] + '\\n' + message['content'] | trim + '<end>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<begin>assistant\\n' }}
{%- endif -%}
"""
"""The chat template of a family without its own in ROWS; the family's own markers replace these."""

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
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') }}
    {{- message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""

GEMMA4_TEMPLATE = """\
{{ bos_token }}
{%- for message in messages -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<|turn>' + role + '\\n' + message['content'] | trim + '<turn|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|turn>model\\n' }}
{%- endif -%}
"""

CONTENT = "message['content'] | trim"
"""The text of a message, as the templates write it."""

SHOWN = """\
{%- macro shown(content) -%}
    {%- if content is string -%}
        {{ content | trim }}
    {%- else -%}
        {%- for part in content -%}
            {{ '<place>' if part['type'] == 'image' else part['text'] | trim }}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
"""
"""A macro for the text of a message that may have parts; the place of a picture replaces its own."""


def with_pictures(template: str, place: str) -> str:
    """Return a chat template for messages with pictures.

    Args:
        template: for messages of text, with CONTENT.
        place: what it writes for a picture.
    """
    return SHOWN.replace("<place>", place) + template.replace(CONTENT, "shown(message['content'])")


HARMONY_TEMPLATE = """\
{%- for message in messages -%}
    {%- if message['role'] == 'assistant' -%}
        {{ '<|start|>assistant<|channel|>final<|message|>' + message['content'] }}
        {{- '<|return|>' if loop.last else '<|end|>' }}
    {%- else -%}
        {{ '<|start|>' + message['role'] + '<|message|>' + message['content'] + '<|end|>' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|start|>assistant' }}
{%- endif -%}
"""


@dataclass(frozen=True)
class Tokens:
    """The tokenizer of a miniature.

    Attributes:
        special: special tokens; a token's index is its id. The first four are for padding, for the end of a
            text, for its beginning, and for unknown text.
        chat_template: a Jinja template.
        turn_end: the id of the token that closes a turn.
        begins: whether a text begins with the third special token.
        media: ids of the tokens that stand for images and sound, by config.json's keys.
        named: tokens that transformers' processor looks up by name, by tokenizer_config.json's keys.
    """

    special: tuple[str, ...]
    chat_template: str
    turn_end: int
    begins: bool = True
    media: Mapping[str, int] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Served:
    """What vLLM-TPU does with a family.

    Attributes:
        eight_bit: 8-bit formats that tpu-inference's JAX model loads and runs.
        whole_head: whether each device keeps a whole copy of a separate output head, because the model
            names no sharding for it.
        split_heads: whether each key and value head is split over all devices where the number of devices
            does not divide the number of heads; other families give each device a whole head.
        tool_call_parser: the parser for the family's tool call markup.
        switches: flags that a server of the family needs, and why they cannot be switched off.
        media_tokens: tokens of the longest image, video or sound that a request may contain.
        towers: what multimodal checkpoints have besides the text model, in words.
    """

    eight_bit: tuple[str, ...] = ()
    whole_head: bool = False
    split_heads: bool = False
    tool_call_parser: str | None = None
    switches: Mapping[str, str] = field(default_factory=dict)
    media_tokens: int = 0
    towers: str | None = None

    @property
    def flags(self) -> Mapping[str, Any]:
        """Return the switches as flags of the server."""
        return dict.fromkeys(self.switches, True)


@dataclass(frozen=True)
class FamilyFacts:
    """What the compiler knows about a family.

    Attributes:
        title: the family's name in messages.
        tokens: the tokenizer of its miniature.
        served: what vLLM-TPU does with it.
        chaotic: whether two runs of its miniature differ, so that parity measures this difference too.
    """

    title: str
    tokens: Tokens
    served: Served = Served()
    chaotic: bool = False


@dataclass(frozen=True)
class Row:
    """The exceptional values of a family, where they differ from the defaults of FamilyFacts."""

    tokens: Tokens | None = None
    served: Served = Served()
    chaotic: bool = False


ROWS: Mapping[str, Row] = MappingProxyType(
    {
        "gemma2": Row(Tokens(GEMMA, GEMMA_TEMPLATE, turn_end=5)),
        "gemma3": Row(
            Tokens(
                (*GEMMA, "<start_of_image>", "<end_of_image>", "<image_soft_token>"),
                with_pictures(GEMMA_TEMPLATE, "<start_of_image>"),
                turn_end=5,
                media={"boi_token_index": 6, "eoi_token_index": 7, "image_token_index": 8},
                named={
                    "boi_token": "<start_of_image>",
                    "eoi_token": "<end_of_image>",
                    "image_token": "<image_soft_token>",
                },
            ),
            Served(towers="a vision tower"),
        ),
        "gemma4": Row(
            Tokens(
                (
                    *(*COMMON, "<|turn>", "<turn|>", "<|image>", "<|image|>", "<image|>", "<|video|>"),
                    *("<|audio>", "<|audio|>", "<audio|>", "<|channel>", "<channel|>", "<|think|>"),
                    *("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
                    *("<|tool_response>", "<tool_response|>"),
                ),
                with_pictures(GEMMA4_TEMPLATE, "<|image|>"),
                turn_end=5,
                media={
                    **{"boi_token_id": 6, "image_token_id": 7, "eoi_token_id": 8, "video_token_id": 9},
                    **{"boa_token_id": 10, "audio_token_id": 11, "eoa_token_index": 12},
                },
                named={"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>"},
            ),
            Served(
                eight_bit=("fp8",),
                split_heads=True,
                tool_call_parser="gemma4",
                switches={
                    # Its attention sees an image's tokens in both directions.
                    "disable-chunked-mm-input": "tpu-inference runs no multimodal model that takes images in "
                    "chunks"
                },
                # A video's frames, each with its borders and its time (vLLM 0.32, gemma4_mm.py).
                media_tokens=32 * (70 + 2 + 6),
                towers="a vision tower, and the small ones an audio tower,",
            ),
            chaotic=True,
        ),
        "gpt_oss": Row(
            Tokens(
                (
                    *("<|endoftext|>", "<|return|>", "<|startoftext|>", "<unk>"),
                    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
                ),
                HARMONY_TEMPLATE,
                turn_end=1,
                begins=False,
            ),
        ),
        "llama": Row(
            Tokens(
                (
                    *("<|finetune_right_pad_id|>", "<|eot_id|>", "<|begin_of_text|>", "<unk>"),
                    *("<|start_header_id|>", "<|end_header_id|>"),
                ),
                LLAMA_TEMPLATE,
                turn_end=1,
            ),
        ),
        "qwen2": Row(served=Served(whole_head=True)),
        "qwen3": Row(served=Served(eight_bit=("fp8",), whole_head=True)),
    }
)


def _facts(family: Family) -> FamilyFacts:
    row = ROWS.get(family.name, Row())
    return FamilyFacts(family.title, row.tokens or _tokens(family), row.served, row.chaotic)


def _tokens(family: Family) -> Tokens:
    """Return a tokenizer with the family's own turn markers."""
    begin, end = family.turn_markers or CHATML
    template = TEMPLATE.replace("<begin>", begin).replace("<end>", end)
    if (begin, end) == CHATML:
        # As in Qwen's tokenizers: the token that ends a turn also ends the text, and no token begins a text.
        special = ("<|endoftext|>", end, begin, "<unk>", "<think>", "</think>")
        return Tokens(special, template, turn_end=1, begins=False)
    return Tokens((*COMMON, begin, end), template, turn_end=5)


@cache
def facts_of(family: str) -> FamilyFacts:
    """Return what the compiler knows about a family, by name, or about a model without a family."""
    return _facts(FAMILIES.get(family) or Transformers())


def family_titles() -> list[str]:
    """Return the names of the families, as messages show them."""
    return [family.title for family in FAMILIES.values()]


SPELLED = {
    "ernie4_5_moe": "Ernie4_5_Moe",
    "hunyuan_v1_dense": "HunYuanDenseV1",
    "minimax_m2": "MiniMaxM2",
    "paddleocr_vl": "PaddleOCRVL",
    "qwen2_vl": "Qwen2VL",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL",
    "qwen3_vl_moe": "Qwen3VLMoe",
    "smollm3": "SmolLM3",
    "granitemoe": "GraniteMoe",
    "granitemoehybrid": "GraniteMoeHybrid",
    "gpt_neox": "GPTNeoX",
    "stablelm": "StableLm",
}
"""Names of transformers' classes by model_type, where the capital letters do not follow from model_type."""


def class_name(config: Mapping[str, Any]) -> str:
    """Return the prefix of transformers' classes of a checkpoint's text model: "Qwen3" of Qwen3ForCausalLM.

    The prefix follows from model_type, and so does its spelling: qwen3_moe is Qwen3Moe, qwen3_5_text Qwen3_5.
    """
    text = text_config(config)
    kind = str(text.get("model_type") or family_of(config).model_types[-1]).removesuffix("_text")
    if kind in SPELLED:
        return SPELLED[kind]
    return re.sub(r"(^|_)([a-z])", lambda letter: letter[2].upper(), kind)


def architecture_class(config: Mapping[str, Any]) -> str:
    """Return the class that loads a checkpoint: from `architectures`, otherwise from model_type."""
    for name in config.get("architectures") or ():
        return str(name)
    if "text_config" not in config:
        return f"{class_name(config)}ForCausalLM"
    return f"{class_name({'model_type': config.get('model_type')})}ForConditionalGeneration"
