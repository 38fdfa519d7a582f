"""The commands `recipe models`: the catalog's, and those that are brought from the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from recipec.compiler.cli.base import AsJson, fail, group, note, print_document, result, tell

LIST = "list"


class ListOrCommand(TyperGroup):
    """A group whose first word may be no command's: then it is a word that is looked for."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags = {name for param in self.params for name in param.opts} | {*ctx.help_option_names}
        first = next((word for word in args if word not in flags), None)
        asks = first is None and (ctx.resilient_parsing or set(args) & {*ctx.help_option_names})
        return super().parse_args(ctx, args if first in self.commands or asks else [LIST, *args])


app = group(
    "List the models of the catalog, or add one from the Hugging Face hub.",
    cls=ListOrCommand,
    subcommand_metavar="[WORD] | COMMAND [ARGS]...",
)


@app.command(LIST)
def list_models(
    word: Annotated[
        str,
        typer.Argument(
            metavar="WORD", help="Part of an id or of a family name; without it, all models are listed."
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List the models of the catalog, with their sizes and what works with each.

    `recipe models WORD` does the same.
    """
    import json
    from dataclasses import asdict

    from recipec.compiler.explain.catalog_table import document, unknown
    from recipec.compiler.explain.catalog_table import models as known

    models = known(word)
    if not models:
        fail([unknown(word)], "json" if as_json else "text")
    if as_json:
        result(json.dumps([asdict(model) for model in models], indent=2))
    else:
        print_document(document(models))


@app.command()
def add(
    model: Annotated[str, typer.Argument(metavar="ID", help="OWNER/NAME on the Hugging Face hub.")],
    revision: Annotated[
        str | None,
        typer.Option("--revision", metavar="R", help="A branch, tag or commit; by default the main branch."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR",
            help="The folder of models, next to the recipes; by default recipes/models if a folder recipes "
            "exists, otherwise models.",
        ),
    ] = None,
) -> None:
    """Add a model from the hub, without downloading its weights.

    It fetches config.json, the tokenizer's files, and the names, shapes and types of all tensors, which
    `recipe check` compares with the model's family. It uses HF_ENDPOINT, HF_TOKEN and the hub's cache.
    """
    from recipec.compiler.catalog import models_folder
    from recipec.compiler.hub.fetch import fetch, write

    models = output or models_folder()
    fetched = fetch(model, revision)
    target = write(fetched, models)
    tell(f"{target}: {fetched}")
    if fetched.name != model:
        note(f"note: the hub's name for it is now {fetched.name}")
    if models.name == "models":
        note(
            f"next: write `model: {{id: {model}}}` in a recipe in {models.parent} to use this model, at "
            "this commit"
        )
    else:
        note(
            f"note: recipes look for it in a folder named models next to them, and {models} has another name"
        )
