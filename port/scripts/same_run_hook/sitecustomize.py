"""A hook in a tool's own process, loaded by PYTHONPATH: records what the tool trains on, and changes nothing.

It writes two things to the folder $SAME_RUN. steps.jsonl has a line for each micro-batch: its optimizer step,
the optimizer's learning rate, the loss as the tool adds it up, and the arrays. adapter/ is the run's initial
adapter, as PEFT saves it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

OUT = Path(os.environ["SAME_RUN"])
ARRAYS = ("input_ids", "labels", "position_ids", "attention_mask", "completion_mask")


def take(step: int, rate: float, loss: Any, batch: Mapping[str, Any]) -> None:
    """Append a micro-batch.

    Args:
        step: optimizer step, counted from 1.
        batch: arrays by the names of ARRAYS; others are ignored.
    """
    arrays = {name: batch[name] for name in ARRAYS if name in batch and hasattr(batch[name], "tolist")}
    line = {"step": step, "rate": rate, "loss": float(loss)}
    with (OUT / "steps.jsonl").open("a") as file:
        file.write(json.dumps(line | {name: array.tolist() for name, array in arrays.items()}) + "\n")


def save_peft(arrays: Mapping[str, Any], rank: int, alpha: float) -> None:
    """Save an adapter that PEFT did not create, in PEFT's format."""
    from safetensors.torch import save_file

    (OUT / "adapter").mkdir()
    kept = {name: array.detach().clone().contiguous() for name, array in arrays.items()}
    save_file(kept, OUT / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = sorted({name.split(".")[-3] for name in arrays})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": targets}
    (OUT / "adapter" / "adapter_config.json").write_text(json.dumps(config))


def of_transformers(module: ModuleType) -> None:
    """Hook transformers' Trainer and its subclasses."""
    inner = module.Trainer.training_step

    def training_step(self: Any, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        if not (OUT / "steps.jsonl").exists():
            whole = self.accelerator.unwrap_model(model)
            if hasattr(whole, "peft_config"):
                whole.save_pretrained(str(OUT / "adapter"))
        batch = {name: array.clone() if hasattr(array, "clone") else array for name, array in inputs.items()}
        rate = self.optimizer.param_groups[0]["lr"]
        loss = inner(self, model, inputs, *rest, **more)
        take(self.state.global_step + 1, rate, loss, batch)
        return loss

    module.Trainer.training_step = training_step


def sizes_of_litgpt(module: ModuleType) -> None:
    """Make litgpt's named configurations take the sizes of the present checkpoint."""
    inner = module.Config.from_name.__func__
    config = json.loads((OUT / "config.json").read_text())

    def from_name(cls: Any, *names: Any, **more: Any) -> Any:
        sizes = {
            "n_layer": config["num_hidden_layers"],
            "n_embd": config["hidden_size"],
            "n_head": config["num_attention_heads"],
            "n_query_groups": config["num_key_value_heads"],
            "head_size": config["head_dim"],
            "intermediate_size": config["intermediate_size"],
            "vocab_size": config["vocab_size"],
            "padded_vocab_size": config["vocab_size"],
            "block_size": config["max_position_embeddings"],
        }
        return inner(cls, *names, **sizes, **more)

    module.Config.from_name = classmethod(from_name)


def of_litgpt(module: ModuleType) -> None:
    """Hook the loop of litgpt's finetune lora."""
    fit, entropy, cycle = module.fit, module.chunked_cross_entropy, module.CycleIterator
    run: dict[str, Any] = {"parts": 0}

    class Cycle(cycle):  # type: ignore[misc, valid-type]
        def __next__(self) -> Any:
            run["batch"] = super().__next__()
            return run["batch"]

    def chunked_cross_entropy(*positional: Any, **more: Any) -> Any:
        loss = entropy(*positional, **more)
        if "batch" in run and "chunk_size" not in more:
            batch = dict(run["batch"])
            counts = batch["token_counts"]["raw_plus_prompt_template"].reshape(-1, 1)
            at = batch["input_ids"].new_ones(batch["input_ids"].shape).cumsum(1)
            batch["attention_mask"] = (at <= counts).long()
            step = run["parts"] // run["accumulation"] + 1
            take(step, run["optimizer"].param_groups[0]["lr"], loss / run["accumulation"], batch)
            run["parts"] += 1
        return loss

    def fitted(**settings: Any) -> Any:
        run["accumulation"] = settings["train"].gradient_accumulation_iters(settings["devices"], 1)
        run["optimizer"] = settings["optimizer"]
        save_adapter(settings["model"])
        return fit(**settings)

    def save_adapter(model: Any) -> None:
        config, rank, tensors = model.config, model.config.lora_r, {}
        names = {"proj": "self_attn.o_proj", "fc_1": "mlp.gate_proj", "fc_2": "mlp.up_proj"}
        for layer, block in enumerate(model.transformer.h):
            head = f"base_model.model.model.layers.{layer}."
            pairs = {f"{head}{names[name]}": getattr(block.mlp, name) for name in ("fc_1", "fc_2")}
            pairs |= {f"{head}self_attn.o_proj": block.attn.proj, f"{head}mlp.down_proj": block.mlp.proj}
            tensors |= {f"{name}.lora_A.weight": pair.lora_A for name, pair in pairs.items()}
            tensors |= {f"{name}.lora_B.weight": pair.lora_B for name, pair in pairs.items()}
            # A of q, k and v are stored in one array; B is zero.
            for number, name in enumerate("qkv"):
                place = f"{head}self_attn.{name}_proj"
                tensors[f"{place}.lora_A.weight"] = block.attn.qkv.lora_A[rank * number : rank * (number + 1)]
                heads = config.n_head if name == "q" else config.n_query_groups
                tensors[f"{place}.lora_B.weight"] = tensors[f"{place}.lora_A.weight"].new_zeros(
                    (heads * config.head_size, rank)
                )
        save_peft(tensors, rank, config.lora_alpha)

    module.fit, module.chunked_cross_entropy, module.CycleIterator = fitted, chunked_cross_entropy, Cycle


TORCHTUNE: dict[str, Any] = {"batches": [], "steps": 0}


def sizes_of_torchtune(module: ModuleType) -> None:
    """Make torchtune's model builders use the sizes of the present checkpoint."""
    inner = module.lora_qwen2
    config = json.loads((OUT / "config.json").read_text())
    sizes = {
        "vocab_size": config["vocab_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "embed_dim": config["hidden_size"],
        "intermediate_dim": config["intermediate_size"],
        "max_seq_len": config["max_position_embeddings"],
        "tie_word_embeddings": config["tie_word_embeddings"],
    }
    module.lora_qwen2 = lambda *rest, **more: inner(*rest, **{**more, **sizes})


def adapters_of_torchtune(module: ModuleType) -> None:
    """Save the initial adapters when torchtune's recipe looks up a model's adapters."""
    inner = module.get_adapter_params

    def get_adapter_params(model: Any) -> Any:
        parameters = inner(model)
        TORCHTUNE["adapters"] = parameters
        return parameters

    module.get_adapter_params = get_adapter_params


def batches_of_torchtune(module: ModuleType) -> None:
    """Record each micro-batch when it is moved to the device, which happens once for each."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    inner = module.batch_to_device

    def before(optimizer: Any, *rest: Any) -> None:
        TORCHTUNE["rate"] = optimizer.param_groups[0]["lr"]

    def batch_to_device(batch: Any, device: Any) -> None:
        if not (OUT / "adapter").exists():
            save_torchtune(TORCHTUNE["adapters"])
        tokens = batch["tokens"]
        real = (tokens != int(os.environ["SAME_RUN_PAD"])).flip(1).long().cumsum(1).flip(1) > 0
        kept = {"input_ids": tokens.clone(), "labels": batch["labels"].clone(), "attention_mask": real.long()}
        kept |= {"position_ids": batch["input_pos"].clone()} if "input_pos" in batch else {}
        TORCHTUNE["batches"].append(kept)
        inner(batch, device)

    register_optimizer_step_pre_hook(before)
    module.batch_to_device = batch_to_device


def save_torchtune(adapters: Mapping[str, Any]) -> None:
    """Save torchtune's adapters by PEFT's names; B is zero, so the order of heads does not matter."""
    names = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    tensors = {}
    for name, array in adapters.items():
        _, layer, block, module, letter, _ = name.split(".")
        part = {"attn": "self_attn", "mlp": "mlp"}[block]
        key = f"base_model.model.model.layers.{layer}.{part}.{names.get(module, module)}"
        tensors[f"{key}.lora_{letter[-1].upper()}.weight"] = array
    rank = next(array.shape[0] for name, array in tensors.items() if "lora_A" in name)
    save_peft(tensors, rank, float(os.environ["SAME_RUN_ALPHA"]))


def log_of_torchtune(module: ModuleType) -> None:
    """Record a step when torchtune logs it, at its end."""
    inner = module.DiskLogger.log_dict

    def log_dict(self: Any, payload: Any, step: int) -> None:
        batches, TORCHTUNE["batches"] = TORCHTUNE["batches"], []
        TORCHTUNE["steps"] += 1
        for batch in batches:
            take(TORCHTUNE["steps"], TORCHTUNE["rate"], float(payload["loss"]) / len(batches), batch)
        inner(self, payload, step)

    module.DiskLogger.log_dict = log_dict


HOOKS = {
    "transformers.trainer": of_transformers,
    "litgpt.config": sizes_of_litgpt,
    "litgpt.finetune.lora": of_litgpt,
    "torchtune.models.qwen2_5._model_builders": sizes_of_torchtune,
    "torchtune.modules.peft": adapters_of_torchtune,
    "torchtune.utils": batches_of_torchtune,
    "torchtune.training.metric_logging": log_of_torchtune,
}


class _After(importlib.abc.MetaPathFinder):
    """A finder that calls a module's hook after the module was loaded."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in HOOKS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                HOOKS[name](module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _After())
