"""README.md of a merged model and of a PEFT adapter: a model card, as the Hugging Face hub reads it.

The same run gives the same text: nothing in it tells the time, or where a file lay on the machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from runtime.data.huggingface import HUB
from runtime.export.card_base import Base, carried
from runtime.export.card_markdown import listed, shell
from runtime.export.card_sections import (
    dataset,
    files_of,
    origin,
    recipe_of,
    section,
    sources,
    title,
    training,
)
from runtime.reach import Reach

FIELDS = (
    *("base_model", "base_model_relation", "library_name", "pipeline_tag", "license", "license_name"),
    *("license_link", "language", "datasets", "tags"),
)
"""Metadata in the order in which a card has them."""
ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM's --max-lora-rank takes."""


def model_card(
    record: Mapping[str, Any],
    lock: Mapping[str, Any],
    base_card: str | None,
    losses: Mapping[str, float] | None = None,
    reach: Reach | None = None,
) -> str:
    """README.md of a merged model.

    Args:
        record: merge.json.
        lock: the run's recipe.lock.json.
        base_card: the base's README.md; what of it cannot be read is left out.
        losses: of the step, by their names in metrics.jsonl ("loss", "eval_loss").
        reach: of the run's adapters, None where it had none.
    """
    name, base = title(record, lock), Base(record["base"])
    lora = record.get("lora")
    data = {"library_name": "transformers", "pipeline_tag": "text-generation", **carried(base_card)}
    if base.on_hub:
        data |= {"base_model": base.id, "base_model_relation": "finetune"}
    how = "fine-tuned in all weights of its text model"
    if lora:
        how = f"fine-tuned with LoRA on {listed(lora.get('targets') or [])}; the adapters are merged into it"
    form = f"Trained weights are stored as {record.get('dtype')}; all others are the base's, bit by bit."
    if record.get("quantization"):
        form = f"Linear weights are quantised to {record['quantization']}; vLLM reads them so."
    parts = [
        f"# {name}",
        f"{base.link}, {how}. {form}",
        "## Use",
        *([] if record.get("quantization") else [_transformers(name, lock)]),
        _serving(f"path/to/{name}", name, lock),
        *training(record, lock, base, losses, reach),
        *origin(record, lock),
        *files_of(record.get("files") or {}),
        *recipe_of(lock),
    ]
    return _front_matter(data, lock) + "\n" + "\n\n".join(parts) + "\n"


def adapter_card(
    record: Mapping[str, Any],
    lock: Mapping[str, Any],
    adapter_config: Mapping[str, Any],
    base_card: str | None = None,
    losses: Mapping[str, float] | None = None,
    reach: Reach | None = None,
) -> str:
    """README.md of a PEFT adapter.

    Args:
        adapter_config: its adapter_config.json.
        record, lock, base_card, losses, reach: as in `model_card`.
    """
    name, base = title(record, lock), Base(record["base"])
    data = {"pipeline_tag": "text-generation", **carried(base_card), "library_name": "peft"}
    data["tags"] = ["lora", *(tag for tag in data.get("tags", []) if tag != "lora")]
    if base.on_hub:
        data |= {"base_model": base.id, "base_model_relation": "adapter"}
    targets = (record.get("lora") or {}).get("targets") or adapter_config.get("target_modules") or []
    parts = [
        f"# {name}",
        f"A LoRA adapter for {base.link}, on {listed([targets] if isinstance(targets, str) else targets)}.",
        "## Use",
        _peft(name, base),
        *_serving_adapter(name, base, adapter_config),
        *training(record, lock, base, losses, reach),
        *origin(record, lock),
        *recipe_of(lock),
    ]
    return _front_matter(data, lock) + "\n" + "\n\n".join(parts) + "\n"


def _front_matter(data: Mapping[str, Any], lock: Mapping[str, Any]) -> str:
    from huggingface_hub import ModelCardData

    paths = [str(source.get("path")) for source in sources(lock, "train")]
    datasets = dict.fromkeys(dataset(path) for path in paths if path.startswith(HUB))
    data = {**data, "datasets": list(datasets)}
    ordered = {key: data[key] for key in FIELDS if data.get(key)}
    return f"---\n{ModelCardData(**ordered).to_yaml(original_order=list(FIELDS))}\n---\n"


def _transformers(name: str, lock: Mapping[str, Any]) -> str:
    if section(lock, "data").get("format") == "text":
        encode = 'inputs = tokenizer("Once upon a time", return_tensors="pt").to(model.device)'
    else:
        encode = "\n".join(
            (
                'messages = [{"role": "user", "content": "Hello!"}]',
                "inputs = tokenizer.apply_chat_template(",
                '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"',
                ").to(model.device)",
            )
        )
    return f"""\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

path = "path/to/{name}"
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
{encode}
output = model.generate(**inputs, max_new_tokens=256)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```"""


def _serving(path: str, name: str, lock: Mapping[str, Any]) -> str:
    serve = section(lock, "serve")
    options = [f"--served-model-name {name}"]
    for key in ("tensor_parallel_size", "max_model_len"):
        if serve.get(key):
            options.append(f"--{key.replace('_', '-')} {serve[key]}")
    return shell(f"vllm serve {path}", options)


def _peft(name: str, base: Base) -> str:
    revision = f', revision="{base.revision}"' if base.revision else ""
    return f"""\
```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{base.path}"{revision}, dtype="auto")
model = PeftModel.from_pretrained(base, "path/to/{name}-adapter")
```"""


def _serving_adapter(name: str, base: Base, config: Mapping[str, Any]) -> Iterator[str]:
    largest = max([int(config.get("r") or 0), *(config.get("rank_pattern") or {}).values()])
    rank = next((rank for rank in ADAPTER_RANKS if rank >= largest), None)
    if rank is None:
        return
    options = ["--enable-lora", f"--max-lora-rank {rank}", f"--lora-modules {name}=path/to/{name}-adapter"]
    if base.revision:
        options.insert(0, f"--revision {base.revision}")
    yield shell(f"vllm serve {base.path}", options)
