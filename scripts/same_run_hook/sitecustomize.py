"""Runs in a tool's own process, by PYTHONPATH: takes down what it trains on, and changes nothing.

Written to the folder $SAME_RUN: steps.jsonl, a line for each micro-batch with its optimizer step, the rate
that its optimizer has, its loss as the tool adds it up, and its arrays; adapter/, what the run starts from,
as PEFT saves it.
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
    """Appends a micro-batch.

    Args:
        step: of the optimizer, from 1.
        batch: arrays by the names of ARRAYS; others are left out.
    """
    arrays = {name: batch[name] for name in ARRAYS if name in batch and hasattr(batch[name], "tolist")}
    line = {"step": step, "rate": rate, "loss": float(loss)}
    with (OUT / "steps.jsonl").open("a") as file:
        file.write(json.dumps(line | {name: array.tolist() for name, array in arrays.items()}) + "\n")


def of_transformers(module: ModuleType) -> None:
    """transformers' Trainer, and those made from it."""
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
    """A named configuration of litgpt's gets the sizes of the checkpoint that is at hand."""
    inner = module.Config.from_name.__func__
    given = json.loads((OUT / "config.json").read_text())

    def from_name(cls: Any, *names: Any, **more: Any) -> Any:
        sizes = {
            "n_layer": given["num_hidden_layers"],
            "n_embd": given["hidden_size"],
            "n_head": given["num_attention_heads"],
            "n_query_groups": given["num_key_value_heads"],
            "head_size": given["head_dim"],
            "intermediate_size": given["intermediate_size"],
            "vocab_size": given["vocab_size"],
            "padded_vocab_size": given["vocab_size"],
            "block_size": given["max_position_embeddings"],
        }
        return inner(cls, *names, **sizes, **more)

    module.Config.from_name = classmethod(from_name)


def of_litgpt(module: ModuleType) -> None:
    """The loop of litgpt's finetune lora."""
    fit, entropy, cycle = module.fit, module.chunked_cross_entropy, module.CycleIterator
    run: dict[str, Any] = {"parts": 0}

    class Cycle(cycle):  # type: ignore[misc, valid-type]
        def __next__(self) -> Any:
            run["batch"] = super().__next__()
            return run["batch"]

    def chunked_cross_entropy(*given: Any, **more: Any) -> Any:
        loss = entropy(*given, **more)
        if "batch" in run and "chunk_size" not in more:
            batch = dict(run["batch"])
            counts = batch["token_counts"]["raw_plus_prompt_template"].reshape(-1, 1)
            at = batch["input_ids"].new_ones(batch["input_ids"].shape).cumsum(1)
            batch["attention_mask"] = (at <= counts).long()
            step = run["parts"] // run["accumulation"] + 1
            take(step, run["optimizer"].param_groups[0]["lr"], loss / run["accumulation"], batch)
            run["parts"] += 1
        return loss

    def fitted(**given: Any) -> Any:
        run["accumulation"] = given["train"].gradient_accumulation_iters(given["devices"], 1)
        run["optimizer"] = given["optimizer"]
        save_adapter(given["model"])
        return fit(**given)

    def save_adapter(model: Any) -> None:
        from safetensors.torch import save_file

        config, rank, found = model.config, model.config.lora_r, {}
        names = {"proj": "self_attn.o_proj", "fc_1": "mlp.gate_proj", "fc_2": "mlp.up_proj"}
        for layer, block in enumerate(model.transformer.h):
            head = f"base_model.model.model.layers.{layer}."
            pairs = {f"{head}{names[name]}": getattr(block.mlp, name) for name in ("fc_1", "fc_2")}
            pairs |= {f"{head}self_attn.o_proj": block.attn.proj, f"{head}mlp.down_proj": block.mlp.proj}
            found |= {f"{name}.lora_A.weight": made.lora_A for name, made in pairs.items()}
            found |= {f"{name}.lora_B.weight": made.lora_B for name, made in pairs.items()}
            # A of q, k and v lie in one; B is zero.
            for number, name in enumerate("qkv"):
                place = f"{head}self_attn.{name}_proj"
                found[f"{place}.lora_A.weight"] = block.attn.qkv.lora_A[rank * number : rank * (number + 1)]
                heads = config.n_head if name == "q" else config.n_query_groups
                found[f"{place}.lora_B.weight"] = found[f"{place}.lora_A.weight"].new_zeros(
                    (heads * config.head_size, rank)
                )
        (OUT / "adapter").mkdir()
        arrays = {name: array.detach().clone().contiguous() for name, array in found.items()}
        save_file(arrays, OUT / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"})
        targets = sorted({name.split(".")[-3] for name in found})
        said = {"peft_type": "LORA", "r": rank, "lora_alpha": config.lora_alpha, "target_modules": targets}
        (OUT / "adapter" / "adapter_config.json").write_text(json.dumps(said))

    module.fit, module.chunked_cross_entropy, module.CycleIterator = fitted, chunked_cross_entropy, Cycle


HOOKS = {
    "transformers.trainer": of_transformers,
    "litgpt.config": sizes_of_litgpt,
    "litgpt.finetune.lora": of_litgpt,
}


class _After(importlib.abc.MetaPathFinder):
    """Calls a module's hook when it has been loaded."""

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
