"""Record what published chat templates of models make of conversations, in model_templates.json.

    PYTHON tests/port/record_model_templates.py FOLDER

FOLDER has the templates as OWNER-NAME.jinja, such as models/templates of llama.cpp. A text is null if the
template refuses the conversation.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

from recipec.runtime.data.template import ChatTemplate

OUTPUT = Path(__file__).with_name("model_templates.json")
MODELS = (
    "google/gemma-2-2b-it",
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.3-70B-Instruct",
    "microsoft/Phi-3.5-mini-instruct",
    "mistralai/Mistral-Nemo-Instruct-2407",
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen3-0.6B",
)
TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}


def _talk(*contents: str, system: str = "") -> list[dict[str, Any]]:
    turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system else turns


TALKS = {
    "one turn": _talk("Hi", "Yes."),
    "two turns": _talk("Hi", "Yes.", "So?", "No."),
    "a system message": _talk("Hi", "Yes.", "So?", "No.", system="Be brief."),
    "white space": _talk(" Hi ", " Yes. ", " So? ", " No. ", system=" Be. "),
    "thoughts": _talk("Hi", "<think>\nHm.\n</think>\n\nYes.", "So?", "<think>\nHm.\n</think>\n\nNo."),
}


@functools.cache
def texts(jinja: str) -> dict[str, str | None]:
    """Return a template's texts of TALKS."""
    template = ChatTemplate(jinja, TOKENS)
    return {name: _text(template, talk) for name, talk in TALKS.items()}


def _text(template: ChatTemplate, talk: list[dict[str, Any]]) -> str | None:
    try:
        return template.render(talk)
    except ValueError:
        return None


def main() -> None:
    made = {id: texts(Path(sys.argv[1], f"{id.replace('/', '-')}.jinja").read_text()) for id in MODELS}
    OUTPUT.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
