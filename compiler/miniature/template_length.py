"""The tokens that a recipe's own chat template adds to the chats of a miniature.

The text of a template, such as a system prompt of several sentences, takes more tokens in a miniature's
tokenizer than in the original's, whose vocabulary has whole words.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.references import is_inline
from recipec.compiler.miniature.small_recipe import DEEDS, SUBJECTS, conversations
from recipec.runtime.data.template import ChatTemplate, TemplateRefusal

MULTIPLE = 32
"""The result is rounded up to it, so that mesh axes divide the lengths as they do without a template."""


def template_tokens(program: Program, model: Path) -> int:
    """Return how many tokens a chat has at most that it would not have with the model's own chat template.

    It is counted on chats with every subject and deed, because they are all of a few forms.

    Args:
        program: of the recipe.
        model: the miniature's checkpoint, with tokenizer and chat template.

    Returns:
        A multiple of MULTIPLE; 0 for a recipe without `data.chat_template`.
    """
    from tokenizers import Tokenizer

    named = program.recipe.data.chat_template
    if named is None:
        return 0
    chats = conversations(len(SUBJECTS) * len(DEEDS))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    settings = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    special = {key: value for key, value in settings.items() if key.endswith("_token") and value is not None}

    def lengths(template: str) -> list[int]:
        """Return the tokens of each chat's question and of each whole chat; 0 for what it refuses."""
        written, out = ChatTemplate(template, special), []
        for messages in (part for chat in chats for part in (chat[:1], chat)):
            text, asks = "", messages[-1]["role"] == "user"
            with suppress(TemplateRefusal):  # the run names the rows, and the reason
                text = written.render([*messages], add_generation_prompt=asks)
            out.append(len(tokenizer.encode(text, add_special_tokens=False).ids))
        return out

    text = named if is_inline(named) else (program.source.parent / named).read_text(encoding="utf-8")
    usual = (model / "chat_template.jinja").read_text(encoding="utf-8")
    most = max(new - old for new, old in zip(lengths(text), lengths(usual), strict=True))
    return -(-max(0, most) // MULTIPLE) * MULTIPLE
