"""What a recipe can say of data in each format: columns to rename, tokens that carry loss.

runtime.data.formats describes the formats, and parses their rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from recipec.runtime.data.columns import READS
from recipec.runtime.data.messages import ROLES

_OF_MESSAGES = ("role", "content", "weight")

FIELDS = {
    format: (*required, *optional, *(() if format in ("instruction", "text") else _OF_MESSAGES))
    for format, (required, optional) in READS.items()
} | {"prompt": ("messages", "prompt", "tools", *_OF_MESSAGES)}
"""What `data.fields` can rename in each format: columns, and the keys of a message."""

LOSS_ON = {
    "chat": ("assistant", "last_assistant", "all"),
    "instruction": ("completion", "assistant", "last_assistant", "all"),
    "prompt_completion": ("completion", "all"),
    "text": ("all",),
    "preference": ("completion",),
    "unpaired_preference": ("completion",),
    "prompt": ("completion",),
}
"""Which tokens can carry loss, by `data.format`.

assistant: what every assistant turn writes; last_assistant: what the last one writes; completion:
everything after the prompt, where a prompt of messages ends in the template's generation prompt; all:
every token that another stands before.
"""

WITH_PICTURES = ("chat", "instruction", "prompt_completion")
"""Formats whose samples may have pictures; `data.fields` can then rename the column images."""

ALONE = ("preference", "unpaired_preference", "prompt")
"""Formats whose answers are judged as a whole: they are not mixed with other formats, and not packed."""


def may_carry(format: str, loss_on: str | Sequence[str]) -> bool:
    """Return whether a `data.loss_on` is valid in a format: roles are valid for chats."""
    if isinstance(loss_on, str):
        return loss_on in LOSS_ON[format]
    return format == "chat" and bool(loss_on) and set(loss_on) <= set(ROLES)
