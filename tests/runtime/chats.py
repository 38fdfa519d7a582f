"""Tokenizers, chat files and a conversation that calls a tool, for the tests of runtime.data."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

GEMMA4 = (
    "{{ bos_token }}"
    "{%- for message in messages -%}"
    "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
    "{{ '<|turn>' + role + '\\n' + message['content'] | trim + '<turn|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|turn>model\\n' }}{%- endif -%}"
)

MARKED = (
    "{{ bos_token }}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{ '<|turn>model\\n' }}"
    "{% generation %}{{ message['content'] + '<turn|>' }}{% endgeneration %}"
    "{{ '\\n' }}"
    "{%- else -%}"
    "{{ '<|turn>' + message['role'] + '\\n' + message['content'] + '<turn|>\\n' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
)

SPECIAL = (
    *("<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<start_of_turn>", "<end_of_turn>"),
    *("<|im_start|>", "<|im_end|>"),
)
TEXT = ["The quick brown fox says hello to the world and thinks.", "user model assistant system think"]


@cache
def tokenizer(template: str = GEMMA4, trim_offsets: bool = False) -> Any:
    """Return a byte-level BPE of 400 entries, with the markers of Gemma 3, Gemma 4 and Qwen."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        TEXT * 4,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=list(SPECIAL),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    # Adds a second <bos> wherever special tokens are requested.
    single = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    backend.post_processor = (
        processors.Sequence([processors.ByteLevel(trim_offsets=True), single]) if trim_offsets else single
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        extra_special_tokens=list(SPECIAL[4:]),
        chat_template=template,
    )


def published(name: str) -> str:
    """Return a model's published chat template; TRL ships copies."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def chat(*turns: str, system: str | None = None) -> list[dict[str, Any]]:
    """Return messages from alternating texts of user and assistant."""
    messages = [{"role": "system", "content": system}] if system else []
    return messages + [
        {"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)
    ]


def write(path: Path, conversations: Iterable[Sequence[dict[str, Any]]]) -> str:
    """Write a .jsonl file of conversations and return its name."""
    path.write_text("".join(json.dumps({"messages": list(c)}) + "\n" for c in conversations), "utf-8")
    return path.name


def renderer_of(tokenizer: Any, template: str, loss_on: str | Sequence[str]) -> Any:
    """Return a renderer for transformers' tokenizer and a template's text."""
    from recipec.runtime.data.control_tokens import special_tokens
    from recipec.runtime.data.masking import Renderer
    from recipec.runtime.data.template import ChatTemplate

    compiled = ChatTemplate(template, tokenizer.special_tokens_map)
    return Renderer(compiled, special_tokens(tokenizer), loss_on)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Where."}},
                "required": ["city"],
            },
        },
    }
]
CALL: list[dict[str, Any]] = [
    {"role": "user", "content": "How is Rome?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}],
    },
    {"role": "tool", "name": "weather", "content": "sunny"},
    {"role": "assistant", "content": "It is sunny in Rome."},
]
