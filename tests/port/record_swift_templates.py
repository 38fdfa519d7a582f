"""Record what ms-swift's own code makes of conversations, by template, in swift_templates.json.

    PYTHON tests/port/record_swift_templates.py TOKENIZER

PYTHON is one with the ms-swift of port/scripts/dialects.py; TOKENIZER a folder with the tokenizer of
tests.runtime.chats. A conversation's text is cut where what is learned begins and ends: the first part is not
learned, the second is.
"""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
OUTPUT = HERE / "swift_templates.json"
TABLE = HERE.parents[1] / "port" / "data" / "chat_templates.json"
SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [
    {"role": "user", "content": "The fox?"},
    {"role": "assistant", "content": "It thinks."},
    {"role": "user", "content": "And the world?"},
    {"role": "assistant", "content": "It says hello."},
]


def main() -> None:
    from swift.template import TEMPLATE_MAPPING
    from swift.template.base import Template
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
    info = {"task_type": "causal_lm", "max_model_len": 10**6, "model_dir": "x", "torch_dtype": None}
    tokenizer.model_info = SimpleNamespace(config=SimpleNamespace(), **info)
    out: dict[str, list[list[str]]] = {}
    rows = json.loads(TABLE.read_text(encoding="utf-8"))["swift"]["templates"]
    for name in (name for name, row in rows.items() if not isinstance(row, str)):
        tokenizer.model_meta = SimpleNamespace(is_multimodal=False, template=name, model_type="x")
        meta = TEMPLATE_MAPPING[name]
        scale = "default" + "+ignore_empty_think" * bool(meta.is_thinking and meta.non_thinking_prefix)
        template = Template(tokenizer, meta, max_length=10**6, loss_scale=scale)  # as its arguments are read
        template.set_mode("train")
        talks = [TALK, [SYSTEM, *TALK]] if template.template_meta.support_system else [TALK]
        out[name] = [parts(tokenizer, template.encode({"messages": list(map(dict, talk))})) for talk in talks]
    lines = [f" {json.dumps(name)}: {json.dumps(each, ensure_ascii=False)}" for name, each in out.items()]
    OUTPUT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def parts(tokenizer: Any, encoded: dict[str, Any]) -> list[str]:
    tokens = zip(encoded["input_ids"], encoded["labels"], strict=True)
    runs = groupby(tokens, lambda pair: pair[1] != -100)
    return [tokenizer.decode([token for token, _ in run]) for _, run in runs]


if __name__ == "__main__":
    main()
