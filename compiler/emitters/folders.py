"""Shell lines by which the scripts of serve/ find the folders of model and adapter on a VM without Docker."""

from __future__ import annotations

from recipec.compiler.emitters.render import shell_word
from recipec.compiler.serving.weights import ServedWeights


def assignment(part: str, weights: ServedWeights, name: str, argument: bool = False) -> list[str]:
    """Return lines that set the variable `part` to the folder in MODEL_DIR or ADAPTER_DIR, or the recipe's.

    The lines may use `here`, the script's own folder. If the recipe does not determine the folder, it is "".

    Args:
        part: "model" or "adapter".
        name: of the recipe.
        argument: whether the script's first argument, if given, takes precedence.
    """
    start, path = _place(part, weights, name)
    default, lines = f"{start}{path}", []
    if shell_word(path) not in (path, '""'):
        # Quotes and braces of the path itself would be special within the braces of a default value.
        lines.append(f'default_{part}="{start}{shell_word(path)[1:]}')
        default = f"$default_{part}"
    given = f"${{{part.upper()}_DIR:-{default}}}"
    if argument:
        given = f"${{1:-{given}}}"
    return [*lines, f'{part}="{given}"']


def _place(part: str, weights: ServedWeights, name: str) -> tuple[str, str]:
    """Return a shell variable, and the path relative to it."""
    if weights.kind == "bucket":
        return "$HOME", f"/.cache/{name}/{part}"
    if weights.address.startswith("~/"):
        return "$HOME", weights.address[1:]
    if weights.address.startswith("/") or not weights.address:
        return "", weights.address
    return "$here", f"/../{weights.address}"
