"""Define a tiny tool, which tests the core without the many keys of the real ones."""

from __future__ import annotations

from recipec.port.keys import Keys
from recipec.port.ledger import Ledger
from recipec.port.meaning import training
from recipec.port.recognize import E1101
from recipec.port.source import MISSING

NAME = "fake"
TITLE = "Faketune"
MARKS = ("fake_model", "fake_rows", "fake_rank")


def port(ledger: Ledger) -> None:
    main = ledger.sources.main
    if main.has("fake_model"):
        ledger.exact(main, "fake_model", {"model.id": main.get("fake_model")})
    else:
        ledger.diagnostics.append(_no_model())
    if main.has("fake_rank"):
        ledger.exact(main, "fake_rank", {"lora.rank": main.get("fake_rank"), "lora.alpha": 2.0})
    else:
        ledger.defaulted("fake_rank", 8, {"lora.rank": 8, "lora.alpha": 2.0}, "Faketune's default")
    if main.get("fake_rows", None) is not None:
        micro = main.get("fake_micro", 1)
        rows = {"train.global_batch_size": main.get("fake_rows")}
        ledger.exact(main, "fake_rows", rows)
        if main.has("fake_micro"):
            ledger.exact(main, "fake_micro", {"train.micro_batch_size": micro})
        else:
            ledger.defaulted("fake_micro", 1, {"train.micro_batch_size": 1}, "Faketune's default")
    if main.has("optim"):
        sets = {"train.optimizer.name": "adamw", "train.optimizer.learning_rate": main.get("optim.rate")}
        ledger.approximated(main, "optim", sets, "its momentum is kept in 8 bits there")
    training.directory(Keys(ledger, main, TITLE), "output_dir")
    if main.has("noise"):
        ledger.unsupported(main, "noise", "no noise is added to the embeddings")
    if main.has("images"):
        ledger.refused(main, "images", E1101, "images are not learned here", "remove `images`")
    if main.has("sets"):
        ledger.exact(main, "sets", {"data.train": [{"path": each.get("path")} for each in main.get("sets")]})
    for other in ledger.sources.others.values():
        if other.get("num_processes") is not MISSING:
            ledger.exact(other, "num_processes", note="the mesh is the accelerator's")


def _no_model() -> object:
    from recipec.spec.diagnostics import Diagnostic

    return Diagnostic(E1101, "no model", help="fake_model: ...")
