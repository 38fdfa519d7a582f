"""Check that the adapter that a run starts from is what the recipe trains."""

from __future__ import annotations

from collections.abc import Iterator

from recipec.compiler import catalog
from recipec.compiler.lowering.facts import Facts
from recipec.compiler.lowering.references import escapes, leads_out
from recipec.runtime.errors import UserError
from recipec.runtime.model.adapters import principal
from recipec.runtime.peft.adapter import PeftConfig, open_adapter
from recipec.runtime.peft.fitting import BUILD, fitting
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic

PLACE = "lora.start_from"
SAID = BUILD.format("")
"""The prefix of recipe lines where the runtime names them."""


E0340 = Code(
    "E0340",
    "adapter to start from that does not fit",
    cause="lora.start_from names a PEFT adapter that cannot be read, or whose rank, alpha, rsLoRA, "
    "DoRA, modules, whole modules or shapes differ from the recipe's. The help has the lines of a "
    "recipe that trains exactly the adapter's modules.",
    cure="Use the lines in the help, or another adapter.",
)

W0342 = Code(
    "W0342",
    "adapter to start from is missing",
    cause="There is no such folder next to the recipe. The artifact is built nevertheless: train.py "
    "looks for the adapter, as for data, below the folder of --data-dir, and checks that it fits.",
    cure="Put the folder next to the recipe, or name an address.",
)

N0343 = Code(
    "N0343",
    "start of the adapters without effect",
    cause="`init` says how fresh adapters start, and `start_from` gives them other values.",
    cure="Remove one of the two.",
)


def check(facts: Facts) -> Iterator[Diagnostic]:
    section = facts.recipe.lora
    if section is None or section.start_from is None:
        return
    if "init" in section.model_fields_set and not principal(section.init):
        message = "init has no effect: the adapters start with the values of start_from"
        yield Diagnostic(N0343, message, "lora.init", "remove the line")
    elsewhere = "://" in section.start_from or escapes(section.start_from)
    if elsewhere or leads_out(facts.folder, section.start_from) or facts.model is None or facts.lora is None:
        return
    folder = facts.folder / section.start_from
    if not folder.is_dir():
        yield Diagnostic(
            W0342,
            f"there is no folder `{section.start_from}` next to the recipe",
            PLACE,
            "put the adapter there, or below the folder of train.py's --data-dir",
        )
        return
    try:
        misfit = fitting(open_adapter(folder), facts.model, facts.lora)
    except UserError as error:
        message = error.message.replace(f"{folder}", section.start_from)
        yield Diagnostic(E0340, message, PLACE, (error.help or "").removeprefix(SAID))
        return
    except ValueError:  # the recipe's own ranks or alphas are invalid, which has its own diagnostic
        return
    yield from _base(facts, misfit.config)


W0341 = Code(
    "W0341",
    "adapter of another base",
    cause="adapter_config.json says that the adapter was trained on another model than `model.id`, or "
    "on another revision. Its A and B fit only the weights with which they were trained.",
    cure="Write that model as `model.id`. If both have the same weights, change nothing.",
)


def _base(facts: Facts, config: PeftConfig) -> Iterator[Diagnostic]:
    """Compare the base model that the adapter names with the recipe's, if it is a model of the hub."""
    model = facts.recipe.model
    other = config.base not in (None, model.id)
    if other and not catalog.is_directory(model.id) and not catalog.is_directory(str(config.base)):
        message = f"the adapter was trained on `{config.base}`, and model.id is `{model.id}`"
        yield Diagnostic(
            W0341, message, PLACE, f"id: {config.base} in model, unless the weights are the same"
        )
    elif not other and config.revision not in (None, model.revision):
        message = f"the adapter was trained on revision {config.revision} of the model"
        yield Diagnostic(W0341, message, PLACE, f"revision: {config.revision} in model")
