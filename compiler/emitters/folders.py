"""How the scripts of serve/ find the folders of model and adapter on a bare machine."""

from __future__ import annotations

from recipec.compiler.emitters.render import shell_word
from recipec.compiler.serving.weights import ServedWeights


def assignment(part: str, weights: ServedWeights, name: str, argument: bool = False) -> list[str]:
    """Lines that set the variable `part` to the folder that MODEL_DIR or ADAPTER_DIR names, or the recipe's.

    They may use `here`, the script's own folder. Where no recipe can know the folder, it is "".

    Args:
        part: "model" or "adapter".
        name: of the recipe.
        argument: whether the script's first argument names the folder before all.
    """
    start, path = _place(part, weights, name)
    default, lines = f"{start}{path}", []
    if shell_word(path) not in (path, '""'):
        # Within the braces of a default its quotes and braces would count.
        lines.append(f'default_{part}="{start}{shell_word(path)[1:]}')
        default = f"$default_{part}"
    given = f"${{{part.upper()}_DIR:-{default}}}"
    if argument:
        given = f"${{1:-{given}}}"
    return [*lines, f'{part}="{given}"']


def _place(part: str, weights: ServedWeights, name: str) -> tuple[str, str]:
    """A shell's variable, and the path behind it."""
    if weights.kind == "bucket":
        return "$HOME", f"/.cache/{name}/{part}"
    if weights.address.startswith("~/"):
        return "$HOME", weights.address[1:]
    if weights.address.startswith("/") or not weights.address:
        return "", weights.address
    return "$here", f"/../{weights.address}"
