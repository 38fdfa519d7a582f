"""A tool, and a conversation that calls it."""

from __future__ import annotations

from typing import Any

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
