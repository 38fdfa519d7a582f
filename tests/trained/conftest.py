"""Fixtures with a tiny model and a PEFT adapter for it, each made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipec.compiler.miniature.small_checkpoint import write_tokenizer
from tests import tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a Gemma 3 whose answers depend on the whole conversation."""
    import torch

    folder = tmp_path_factory.mktemp("trained") / "merged"
    kinds = ["sliding_attention", "full_attention"]
    made = tiny.make_gemma3(folder, vocab_size=512, num_hidden_layers=2, layer_types=kinds)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
                parameter.add_(7)  # otherwise the embedding repeats the last token
    made.save_pretrained(folder)
    write_tokenizer(folder, "gemma3")
    return folder


@pytest.fixture(scope="session")
def adapter(model: Path) -> Path:
    """Write an adapter next to the model, which it names."""
    return adapted(model, model.parent / "adapter", seed=1)


def adapted(model: Path, folder: Path, seed: int, **config: object) -> Path:
    """Write a PEFT adapter of random A and B, as PEFT's save_pretrained does."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    given = {"r": 4, "lora_alpha": 64, "target_modules": ["q_proj", "down_proj"], **config}
    found = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model),
        LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **given),  # type: ignore[arg-type]
    )
    found.save_pretrained(folder)
    return folder
