"""A tool's run, as the rules of its dialect see it."""

from __future__ import annotations

from dataclasses import dataclass, field

from recipec.compiler.catalog import Model
from recipec.port.keys import Keys
from recipec.port.ledger import Ledger
from recipec.port.meaning.adapters import Chosen
from recipec.port.meaning.model_names import Named
from recipec.port.meaning.sharding import DeepSpeed, Launch


@dataclass
class Run:
    """The keys of a run, and what earlier rules learned of it for later ones.

    A dialect whose rules learn more has a subclass.

    Attributes:
        keys: the keys of the run's file.
        named: the model; None if the file names none.
        objective: the recipe's `train.objective`.
        lora: whether adapters are trained.
        chosen: the modules that carry adapters; None if they are not known.
        learning_rate: the peak learning rate.
        optim: the key that names the optimizer.
        muon: the key that selects LLaMA-Factory's Muon instead, "" for none.
        launch: how the run was started.
        deepspeed: what a DeepSpeed configuration overrides.
    """

    keys: Keys
    named: Named | None = None
    objective: str = "sft"
    lora: bool = False
    chosen: Chosen | None = None
    learning_rate: float = 0.0
    optim: str = "optim"
    muon: str = ""
    launch: Launch = field(default_factory=Launch)
    deepspeed: DeepSpeed = field(default_factory=DeepSpeed)

    @property
    def ledger(self) -> Ledger:
        """The ledger of the port."""
        return self.keys.ledger

    @property
    def model(self) -> Model | None:
        """The model; None if it is unknown."""
        return self.named.model if self.named is not None else None

    def section(self, name: str) -> Keys:
        """Return the keys of a section, those of the file itself for ""."""
        return self.keys.below(name) if name else self.keys
