"""Define a tiny tool, which tests the core without the many keys of the real ones."""

from __future__ import annotations

from collections.abc import Sequence

from recipec.port.engine import Rule, Says
from recipec.port.keys import Keys
from recipec.port.ledger import Ledger
from recipec.port.meaning import training
from recipec.port.meaning.run import Run
from recipec.port.recognize import E1101
from recipec.spec.diagnostics import Diagnostic

NAME = "fake"
TITLE = "Faketune"
MARKS = ("fake_model", "fake_rows", "fake_rank")


def opened(ledger: Ledger) -> Run:
    return Run(Keys(ledger, ledger.sources.main, TITLE, {"fake_rank": 8, "fake_micro": 1}))


def _all(run: Run) -> Says:
    keys = run.keys
    if keys.stands("fake_model"):
        yield keys.same("fake_model", {"model.id": keys.value("fake_model")})
    else:
        yield keys.warn(_no_model())
    yield keys.say("fake_rank", {"lora.rank": keys.value("fake_rank"), "lora.alpha": 2.0})
    if keys.given("fake_rows"):
        yield keys.say("fake_rows", {"train.global_batch_size": keys.value("fake_rows")})
        yield keys.say("fake_micro", {"train.micro_batch_size": keys.value("fake_micro")})
    rate = {"train.optimizer.name": "adamw", "train.optimizer.learning_rate": keys.source.get("optim.rate")}
    if keys.stands("optim"):
        yield keys.say("optim", rate, "its momentum is kept in 8 bits there")
    yield from training.directory(keys, "output_dir")
    yield keys.unless("noise", (), "no noise is added to the embeddings")
    if keys.stands("images"):
        yield keys.refuse("images", E1101, "images are not learned here", "remove `images`")
    if keys.stands("sets"):
        yield keys.same("sets", {"data.train": [{"path": each.get("path")} for each in keys.value("sets")]})
    for other in run.ledger.sources.others.values():
        yield Keys(run.ledger, other, TITLE).same("num_processes", note="the mesh is the accelerator's")


def _no_model() -> Diagnostic:
    return Diagnostic(E1101, "no model", help="fake_model: ...")


RULES: Sequence[Rule[Run]] = (_all,)
