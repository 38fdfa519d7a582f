"""serve/eval.sh and requirements-eval.txt: the recipe's prompts and tasks, asked of the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiler import catalog, pins
from compiler.render import render, shell_word
from compiler.serving.container import container
from compiler.sources import asks_chats

if TYPE_CHECKING:
    from compiler.program import Program
    from spec.language import Recipe

PYTHON = "3.11 or 3.12"
"""That lm-eval's pinned packages install on."""


def emit_evaluate(program: Program) -> dict[str, str]:
    """The files by path; none without a `serve` section, or with nothing to evaluate."""
    recipe = program.recipe
    serve, evaluate = recipe.serve, recipe.evaluate
    if serve is None or not (evaluate.prompts or evaluate.tasks):
        return {}
    server = container(recipe, program.family.name)
    chat = asks_chats(recipe)
    files = {
        "serve/eval.sh": render(
            "serve/eval.sh",
            url=server.health_url.removesuffix("/health"),
            name=server.name,
            base=f"{server.name}-base" if serve.weights == "adapter" else None,
            prompts=evaluate.prompts,
            text=not chat,
            samples=evaluate.samples,
            temperature=evaluate.temperature,
            max_tokens=evaluate.max_tokens,
            tasks=evaluate.tasks,
            task_api="chat" if chat else "completions",
            tokenizer=_tokenizer(recipe) if not chat else None,
            max_length=serve.max_model_len,
            limit=evaluate.limit,
        )
    }
    if evaluate.tasks:
        packages = pins.evaluation()
        files["requirements-eval.txt"] = render(
            "requirements-eval.txt", python=PYTHON, direct=packages.direct, transitive=packages.transitive
        )
    return files


def _tokenizer(recipe: Recipe) -> str | None:
    """What lm-eval tokenises with, as a shell writes it: of the hub, or beside the merged weights.

    None where only who runs it can know: then --tokenizer has to be given.
    """
    for name in (recipe.model.tokenizer, recipe.model.id):
        if name and not catalog.is_directory(name) and "://" not in name:
            return shell_word(name)
    if "://" in recipe.merge.output:
        return None
    return '"$here/../"' + shell_word(recipe.merge.output)
