"""The language of recipes as Pydantic models, one module per group of sections.

`extends` and `--set` are resolved before a model is built. spec.load checks rules across keys.
"""

from __future__ import annotations

from recipec.spec.language.data import Data, Source
from recipec.spec.language.launch import Cost, Launch
from recipec.spec.language.lora import Lora
from recipec.spec.language.mesh import Mesh, Remat, Sharding, ShardingRule
from recipec.spec.language.model import Model
from recipec.spec.language.recipe import Recipe
from recipec.spec.language.reinforcement import Reward, RewardLimits, Rollout
from recipec.spec.language.section import Section
from recipec.spec.language.serve import Benchmark, Evaluate, Serve
from recipec.spec.language.train import Cache, Checkpoint, Log, Merge, Optimizer, Schedule, Train
from recipec.spec.versions import VERSION

__all__ = [
    "VERSION",
    "Benchmark",
    "Cache",
    "Checkpoint",
    "Cost",
    "Data",
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
    "Reward",
    "RewardLimits",
    "Rollout",
    "Schedule",
    "Section",
    "Serve",
    "Sharding",
    "ShardingRule",
    "Source",
    "Train",
]
