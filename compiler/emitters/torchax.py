"""Emit the TorchAX backend's files: train_torchax.py, and the packages that it was tested with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from recipec.compiler.emitters.python_text import docstring
from recipec.compiler.emitters.render import render
from recipec.compiler.emitters.settings import check_rounding, check_whole, devices, kind
from recipec.compiler.emitters.train import requirements_text, script
from recipec.compiler.lowering import pins
from recipec.runtime.model.partition_rules import TOKENS
from recipec.spec.diagnostics import Diagnostic

if TYPE_CHECKING:
    from recipec.compiler.emitters.backends import Files
    from recipec.compiler.lowering.pins import Pins
    from recipec.compiler.lowering.program import Program

SCRIPT = "train_torchax.py"
REQUIREMENTS = "requirements-torchax.txt"
USE_TUNIX = "build without --backend torchax"


def emit_torchax(program: Program) -> Files:
    """Return the backend's files of an artifact."""
    return {SCRIPT: emit_script(program), REQUIREMENTS: requirements_text(program, packages(program), SCRIPT)}


def emit_alone(program: Program) -> Files:
    """Return the files that train a model which Tunix does not have, under the names of Tunix's files."""
    return {
        "train.py": emit_script(program, "train.py", "train"),
        "requirements-train.txt": requirements_text(program, packages(program)),
    }


def emit_script(program: Program, name: str = SCRIPT, requirements: str = "torchax") -> str:
    """Return the text of train_torchax.py.

    Args:
        name: the script's name.
        requirements: the name of its requirements file, after "requirements-".
    """
    title = docstring(
        f"{kind(program)} of {program.recipe.model.id} on {devices(program)}, by transformers' model "
        "under torchax."
    )
    names = {"torchax": True, "name": name, "requirements": requirements}
    return render("train.py", title=title, **names, **script(program))


def packages(program: Program) -> Pins:
    """Return the environment of train_torchax.py: that of train.py, and torch."""
    return pins.training(program) | pins.torchax()


def check(program: Program) -> Iterator[Diagnostic]:
    """Yield what the backend cannot do of a recipe, and what it does differently from train.py."""
    recipe = program.recipe
    if recipe.train.optimizer.name == "muon":
        yield Diagnostic(
            "E0920",
            "--backend torchax: train.py's Muon knows only Tunix's arrays",
            "train.optimizer.name",
            f"name: adamw, or {USE_TUNIX}",
        )
    if program.lora is not None and program.lora.kv == "shared":
        yield Diagnostic(
            "E0922",
            "--backend torchax: PEFT gives k_proj and v_proj an A each, and kv: shared has one for both",
            "lora.kv",
            f"kv: independent, or {USE_TUNIX}",
        )
    if program.lora is not None and program.lora.products:
        yield Diagnostic(
            "E0938",
            "--backend torchax always multiplies in model.dtype",
            "lora.products",
            f"products: null, or {USE_TUNIX}",
        )
    if program.lora is not None and program.lora.kind != "lora":
        yield Diagnostic(
            "E0942",
            "--backend torchax trains only A and B, without DoRA's magnitudes",
            "lora.kind",
            f"kind: lora, or {USE_TUNIX}",
        )
    yield from check_whole(program, "torchax")
    yield from check_rounding(program, "torchax")
    if program.lora is not None and program.lora.init == "loftq":
        yield Diagnostic(
            "E0950",
            "--backend torchax stores nf4 in its own blocks, for which LoftQ is not computed",
            "lora.init",
            f"init: peft, or {USE_TUNIX}",
        )
    if recipe.train.neftune_noise_alpha is not None:
        yield Diagnostic(
            "E0941",
            "--backend torchax adds no noise to transformers' embeddings",
            "train.neftune_noise_alpha",
            f"neftune_noise_alpha: null, or {USE_TUNIX}",
        )
    if TOKENS in recipe.mesh.axes:
        yield Diagnostic(
            "E0939",
            f"--backend torchax: cp={recipe.mesh.axes[TOKENS]} splits the tokens of a row, and transformers' "
            "attention needs whole rows",
            "mesh.axes.cp",
            USE_TUNIX,
        )
    if "model." not in program.family.prefixes:
        yield Diagnostic(
            "E0949",
            f"--backend torchax does not compute {program.family.title}: its decoder has another name in "
            "transformers",
            "model.id",
            USE_TUNIX,
        )
    experts = program.architecture.routing[0]
    if experts:
        yield Diagnostic(
            "E0933",
            f"--backend torchax: jax does not compile transformers' layers of {experts} experts",
            "model.id",
            USE_TUNIX,
        )
    if recipe.train.only:
        yield Diagnostic(
            "E0944",
            "--backend torchax trains all weights, or adapters",
            "train.only",
            f"remove the line, or {USE_TUNIX}",
            at_key=True,
        )
    if recipe.remat.policy == "block":
        yield Diagnostic(
            "N0934",
            "the TorchAX backend recomputes whole layers, as with remat.policy: decoder",
            "remat.policy",
        )
    if recipe.sharding.rules and program.family.tunix:
        yield Diagnostic(
            "N0935",
            "the rules name Tunix's arrays. Hugging Face's tensors join some dimensions of these arrays "
            "into one, which the TorchAX backend splits like the first of them",
            "sharding.rules",
        )
    if recipe.train.optimizer.name == "adafactor":
        yield Diagnostic(
            "N0936",
            "the TorchAX backend's Adafactor factors the matrix of each projection. In train.py some "
            "projections form one array of three or four dimensions, and the steps differ a little",
            "train.optimizer.name",
        )
