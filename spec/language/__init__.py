"""The language of recipes as Pydantic models, one module per group of sections.

`extends` and `--set` are resolved before a model is built; rules across keys are asked by spec.load.
"""

from __future__ import annotations

from spec.language.base import Section
from spec.language.data import Data, DataSource
from spec.language.launch import Cost, Launch
from spec.language.lora import Lora
from spec.language.mesh import Mesh, Remat, Sharding, ShardingRule
from spec.language.model import Model
from spec.language.recipe import Recipe
from spec.language.serve import Benchmark, Evaluate, Serve
from spec.language.train import Cache, Checkpoint, Log, Merge, Optimizer, Schedule, Train
from spec.versions import VERSION

__all__ = [
    "VERSION",
    "Benchmark",
    "Cache",
    "Checkpoint",
    "Cost",
    "Data",
    "DataSource",
    "Evaluate",
    "Launch",
    "Log",
    "Lora",
    "Merge",
    "Mesh",
    "Model",
    "Optimizer",
    "Recipe",
    "Remat",
    "Schedule",
    "Section",
    "Serve",
    "Sharding",
    "ShardingRule",
    "Train",
]
