"""Arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Format = Literal["text", "json"]
"""How diagnostics are shown."""
Recipe = Annotated[
    Path,
    typer.Argument(metavar="RECIPE", help="YAML file of a recipe."),
]
Recipes = Annotated[
    list[Path],
    typer.Argument(metavar="RECIPE", help="YAML files of recipes."),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Set a key to a YAML value; may be repeated."),
]
Shown = Annotated[
    Format, typer.Option("--format", help="Print diagnostics as text on stderr, or as JSON on stdout.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", metavar="DIR", help="Folder of the data; by default the recipe's folder."),
]
Keep = Annotated[
    Path | None, typer.Option("--keep", metavar="DIR", help="Keep the files of the runs in this folder.")
]
Tokenizer = Annotated[
    Path | None, typer.Option("--model", metavar="DIR", help="Folder of the model or of its tokenizer.")
]
Output = Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="The folder of artifacts.")]
