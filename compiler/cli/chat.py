"""`recipe chat`."""

from __future__ import annotations

import sys

from recipec.compiler.cli.arguments.trained import ChatArguments
from recipec.compiler.terminal import on_ctrl_c
from recipec.compiler.trained.chat import Talk, converse
from recipec.compiler.trained.chat_engines import Options
from recipec.spec.diagnostics import printable


def chat(args: ChatArguments) -> None:
    """Run `recipe chat`."""
    on_ctrl_c(None)
    options = Options(args.base, args.template, args.system, args.max_tokens, args.temperature, args.engine)
    talk = Talk(args.folder, options, _say)
    if args.prompt is None:
        converse(talk)
    else:
        talk.answer(args.prompt)


def _say(text: str) -> None:
    sys.stdout.write(printable(text))
    sys.stdout.flush()
