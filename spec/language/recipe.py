"""The recipe: the root section of the language."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema, model_validator

from recipec.spec import versions
from recipec.spec.language.data import Data
from recipec.spec.language.launch import Budget, Cost, Launch
from recipec.spec.language.lora import Lora
from recipec.spec.language.mesh import Mesh, Remat, Sharding, Xla
from recipec.spec.language.model import Model
from recipec.spec.language.reinforcement import Grpo, Reward, RewardLimits, Rollout
from recipec.spec.language.section import E0106, Section, fault, field, section
from recipec.spec.language.serve import Benchmark, Evaluate, Serve
from recipec.spec.language.train import Cache, Checkpoint, Merge, Train, default_rate
from recipec.spec.versions import E0108


def _version(value: Any) -> Any:
    version = versions.VERSION
    if isinstance(value, bool) or value != version or not isinstance(value, int):
        raise fault(E0108, f"this compiler reads version {version} of the language", f"recipe: {version}")
    return value


def _free_name(name: str) -> str:
    if name == "runtime":
        raise fault(E0106, "`runtime` is the folder that the artifacts share", "choose another name")
    return name


class Recipe(Section):
    """How a model is fine-tuned and served on TPUs."""

    recipe: Annotated[int, BeforeValidator(_version), WithJsonSchema({"const": versions.VERSION})] = field(
        "Version of the language.", example=versions.VERSION
    )
    name: Annotated[str, AfterValidator(_free_name)] = field(
        "Name of the artifact: its folder, containers and cloud resources. Lower-case letters, digits and "
        "hyphens.",
        pattern=r"^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$",
        form="lower-case letters, digits and hyphens, starting with a letter, at most 63",
        example="gemma4-31b-codev",
    )
    extends: str | None = field(
        "Another recipe, relative to this file's folder. Its values apply to keys that this file does not "
        "give. Mappings are merged, lists are replaced.",
        None,
        min_length=1,
        example="base.yaml",
    )
    model: Model = field(
        "The checkpoint to fine-tune, and how the model computes.", example={"id": "google/gemma-4-31B-it"}
    )
    mesh: Mesh = field(
        "The devices, and their arrangement along the mesh axes.",
        example={"accelerator": "v5p-8", "axes": {"fsdp": 4, "tp": 1}},
    )
    lora: Lora | None = field(
        "Low-rank adapters; null means full fine-tuning.",
        None,
        example={"rank": 16, "targets": ["q_proj", "v_proj"]},
    )
    sharding: Sharding = section(
        "How parameters are split, in addition to the family's defaults.",
        Sharding,
        {"on_indivisible": "replicate"},
    )
    remat: Remat = section("What the backward pass recomputes.", Remat, {"policy": "block"})
    xla: Xla = section("Compiler flags of the training step.", Xla, {"profile": "v5p"})
    data: Data = field(
        "Samples, and how they become rows of tokens.", example={"train": ["data/train.jsonl"]}
    )
    train: Train = section(
        "The run: its length, batches, optimizer and schedule.", Train, {"epochs": 1, "global_batch_size": 8}
    )
    rewards: list[Reward] = field(
        "What grpo rewards: a list of functions and ready rewards, whose weighted sum is a completion's "
        "reward.",
        [],
        example=[{"function": "rewards.py:correct"}, {"length": {"maximum": 256}, "weight": 0.1}],
    )
    reward_limits: RewardLimits = section(
        "Limits of the processes in which rewards run.", RewardLimits, {"seconds": 60}, compiled=False
    )
    rollout: Rollout = section(
        "How grpo generates completions, and distill the student's own answers.",
        Rollout,
        {"axes": {"tp": 8}},
    )
    checkpoint: Checkpoint = section(
        "Where and how often the training state is saved.",
        Checkpoint,
        {"directory": "gs://bucket/run", "every_steps": 100},
    )
    cache: Cache = section(
        "Files kept between runs, so that the next one starts faster.",
        Cache,
        {"directory": "gs://bucket/cache"},
    )
    merge: Merge = section(
        "How the adapters are merged into the checkpoint.", Merge, {"output": "gs://bucket/merged"}
    )
    serve: Serve | None = field(
        "A vLLM-TPU server for the trained model; null writes none.",
        None,
        example={"accelerator": "v6e-8", "tensor_parallel_size": 8},
    )
    benchmark: Benchmark = section(
        "What the server's benchmark measures.",
        Benchmark,
        {"input_lengths": [512, 4096], "request_rates": [1, 4, "inf"]},
    )
    evaluate: Evaluate = section(
        "Evaluations that run against the server.", Evaluate, {"tasks": ["gsm8k"], "limit": 100}
    )
    launch: Launch = section("How the run is started in the cloud.", Launch, {"spot": True, "kind": ["gke"]})
    cost: Cost = section(
        "Prices that replace the catalog's, and a baseline for comparing costs.",
        Cost,
        {"train_usd_per_hour": 16.8},
    )
    budget: Budget = section(
        "Limits of the run, which `recipe plan` checks.", Budget, {"max_hbm_share": 0.9, "max_usd": 200}
    )

    @model_validator(mode="after")
    def _rate_of_method(self) -> Recipe:
        """Fill in the method's learning rate, if no key gives one. It stays a default."""
        optimizer = self.train.optimizer
        if "learning_rate" not in optimizer.model_fields_set:
            optimizer.__dict__["learning_rate"] = default_rate(self.lora is None, self.train.objective)
        return self

    @model_validator(mode="after")
    def _length_of_completions(self) -> Recipe:
        """Fill in the keys of grpo, and the row's length, if no key gives them. They stay defaults."""
        if self.train.objective == "grpo":
            grpo = self.train.grpo or Grpo()
            self.train.__dict__["grpo"] = grpo
            if "max_length" not in self.data.model_fields_set:
                self.data.__dict__["max_length"] = grpo.max_prompt_length + grpo.max_completion_length
        return self

    @model_validator(mode="after")
    def _rows_of_own_answers(self) -> Recipe:
        """Give each sample a row, if a student answers it anew and no key says otherwise."""
        distill = self.train.distill if self.train.objective == "distill" else None
        if distill is not None and distill.lmbda and "packing" not in self.data.model_fields_set:
            self.data.__dict__["packing"] = False
        return self

    @property
    def server(self) -> Serve:
        """The section `serve` of a recipe that has one."""
        assert self.serve is not None
        return self.serve
