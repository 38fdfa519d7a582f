"""transformers' configs made from architectures, held against what the families read."""

from __future__ import annotations

from pathlib import Path

from recipec.compiler.lowering import catalog
from recipec.compiler.plan.hf_config import hf_config


def test_every_models_config_reads_as_its_architecture() -> None:
    names = [name for name, entry in catalog.entries().items() if "unsupported" not in entry]
    assert len(names) > 50
    for name in names:
        model = catalog.find(name, Path())
        assert model.family.architecture(hf_config(model.architecture)) == model.architecture, name
