"""`recipe models`."""

from __future__ import annotations

import json
from dataclasses import asdict

from recipec.compiler.catalog.added import models_folder
from recipec.compiler.cli.arguments.models import AddModelArguments, ListModelsArguments
from recipec.compiler.cli.printing import fail
from recipec.compiler.explain.catalog_table import document, unknown
from recipec.compiler.explain.catalog_table import models as known
from recipec.compiler.hub.fetch import fetch, write
from recipec.compiler.pages.text import show as print_document
from recipec.compiler.terminal import note, result, tell


def list_models(args: ListModelsArguments) -> None:
    """Run `recipe models list`."""
    models = known(args.word)
    if not models:
        fail([unknown(args.word)], "json" if args.as_json else "text")
    if args.as_json:
        result(json.dumps([asdict(model) for model in models], indent=2))
    else:
        print_document(document(models))


def add_model(args: AddModelArguments) -> None:
    """Run `recipe models add`."""
    models = args.output or models_folder()
    fetched = fetch(args.model, args.revision)
    target = write(fetched, models)
    tell(f"{target}: {fetched}")
    if fetched.name != args.model:
        note(f"note: the hub's name for it is now {fetched.name}")
    if models.name == "models":
        note(
            f"next: write `model: {{id: {args.model}}}` in a recipe in {models.parent} to use this model, at "
            "this commit"
        )
    else:
        note(
            f"note: recipes look for it in a folder named models next to them, and {models} has another name"
        )
