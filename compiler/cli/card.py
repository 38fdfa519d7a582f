"""`recipe card`."""

from __future__ import annotations

import json

from recipec.compiler import card as cards
from recipec.compiler.cli.arguments.recipes import CardArguments
from recipec.compiler.cli.reading import read_program
from recipec.compiler.pages.text import show as print_document


def card(args: CardArguments) -> None:
    """Run `recipe card`."""
    program = read_program(args.recipe, args.sets)[2]
    if args.as_json:
        print(json.dumps(cards.as_json(program), indent=2))
    else:
        print_document(cards.document(program))
