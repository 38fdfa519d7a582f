"""The package versions that this compiler's artifacts were tested with, from data/pins.json.

Each set has the packages that a script imports ("direct") and their dependencies ("transitive").
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipec.compiler.lowering.references import addresses

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program

DATA = Path(__file__).parents[1] / "data" / "pins.json"


@dataclass(frozen=True)
class Pins:
    """Versions by package, sorted by name.

    Attributes:
        direct: packages that the generated scripts and the runtime import.
        transitive: dependencies of those packages.
    """

    direct: Mapping[str, str]
    transitive: Mapping[str, str]

    @property
    def all(self) -> dict[str, str]:
        return dict(sorted({**self.direct, **self.transitive}.items()))

    def __or__(self, other: Pins) -> Pins:
        return Pins(
            _sorted({**self.direct, **other.direct}), _sorted({**self.transitive, **other.transitive})
        )


@functools.cache
def sets() -> Mapping[str, Any]:
    """Return data/pins.json: the sets by environment."""
    data: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return data


def training(program: Program) -> Pins:
    """Return the environment of train.py and merge.py."""
    return _logging(program, without_logging(program))


def without_logging(program: Program) -> Pins:
    """Return that environment without the packages that send a run's metrics elsewhere."""
    pins = _reaching(program, _pins(f"train-{program.accelerator.platform}"))
    schemas = any(reward.json_schema is not None for reward in program.recipe.rewards)
    return pins | _pins("jsonschema") if schemas else pins


def torchax() -> Pins:
    """Return what train_torchax.py needs in addition to the environment of train.py."""
    return _pins("torchax")


def evaluation() -> Pins:
    """Return the environment of lm-eval, which serve/eval.sh runs."""
    return _pins("eval")


def trl(program: Program) -> Pins:
    """Return the environment of train_trl.py."""
    pins = _pins("trl")
    if program.recipe.model.quantization is not None:
        pins |= _pins("trl-quantized")
    if program.recipe.data.images is not None:
        pins |= _pins("trl-pictures")
    return _logging(program, _reaching(program, pins))


def _reaching(program: Program, pins: Pins) -> Pins:
    """Add the packages that read and write the addresses which a recipe names."""
    return pins | _pins("gcs") if uses_gcs(program) else pins


def _logging(program: Program, pins: Pins) -> Pins:
    """Add the packages that send a run's metrics to the recipe's destination."""
    log = program.recipe.train.log
    for name, asked in (("wandb", log.wandb_project), ("mlflow", log.mlflow_experiment)):
        pins = pins if asked is None else pins | _pins(name)
    return pins


def uses_gcs(program: Program) -> bool:
    """Return whether anything that a recipe reads or writes lies in Google Cloud Storage."""
    return any(address.startswith("gs://") for address in addresses(program.recipe))


def _pins(name: str) -> Pins:
    return Pins(sets()[name]["direct"], sets()[name]["transitive"])


def _sorted(versions: Mapping[str, str]) -> dict[str, str]:
    return dict(sorted(versions.items()))
