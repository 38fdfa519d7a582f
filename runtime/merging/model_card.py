"""Write README.md of a merged model and of a PEFT adapter: a model card for the Hugging Face hub.

The same run gives the same text: it contains no time and no path of the machine. The license, the languages
and similar metadata come from the base's own card.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..checkpoints.record import LOCK
from ..data.file_rows import HUB, address_of
from ..model.reach import Reach
from ..peft.peft_names import refused_parts
from ..training.objectives import OBJECTIVES, settings_of

FIELDS = (
    *("base_model", "base_model_relation", "library_name", "pipeline_tag", "license", "license_name"),
    *("license_link", "language", "datasets", "tags"),
)
"""Metadata keys in a card's order."""
ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM's --max-lora-rank accepts."""


def model_card(
    record: Mapping[str, Any],
    lock: Mapping[str, Any],
    base_card: str | None,
    losses: Mapping[str, float] | None = None,
    reach: Reach | None = None,
) -> str:
    """Return README.md of a merged model.

    Args:
        record: merge.json.
        lock: the run's recipe.lock.json.
        base_card: the base's README.md; unreadable parts are left out.
        losses: losses of the step, by their names in metrics.jsonl ("loss", "eval_loss").
        reach: what the run's adapters cover, None if it had none.
    """
    name, base, lora = _title(record, lock), Base(record["base"]), record.get("lora")
    how = f"fine-tuned in {_whole(_section(lock, 'train').get('trainable_modules'))} of its text model"
    if lora:
        how = f"fine-tuned with LoRA on {_listed(lora.get('targets') or [])}; the adapters are merged into it"
    form = f"Trained weights are stored as {record.get('dtype')}; all others are unchanged from the base."
    if record.get("quantization"):
        form = f"Linear weights are quantized to {record['quantization']}; vLLM reads them so."
    use = [] if record.get("quantization") else [_transformers(name, lock)]
    use.append(_serving(f"path/to/{name}", name, lock))
    data = {"library_name": "transformers", "pipeline_tag": "text-generation", **carried(base_card)}
    body = [f"{base.link}, {how}. {form}", "## Use", *use, *_training(record, lock, base, losses, reach)]
    return _card(data, record, lock, "finetune", body)


def adapter_card(
    record: Mapping[str, Any],
    lock: Mapping[str, Any],
    adapter_config: Mapping[str, Any],
    base_card: str | None = None,
    losses: Mapping[str, float] | None = None,
    reach: Reach | None = None,
) -> str:
    """Return README.md of a PEFT adapter.

    Args:
        adapter_config: the adapter's adapter_config.json.
        record, lock, base_card, losses, reach: as in `model_card`.
    """
    name, base = _title(record, lock), Base(record["base"])
    data = {"pipeline_tag": "text-generation", **carried(base_card), "library_name": "peft"}
    data["tags"] = ["lora", *(tag for tag in data.get("tags", []) if tag != "lora")]
    targets = (record.get("lora") or {}).get("targets") or adapter_config.get("target_modules") or []
    what = _listed([targets] if isinstance(targets, str) else targets)
    use = [_peft(name, base), *_serving_adapter(name, base, adapter_config)]
    body = [f"A LoRA adapter for {base.link}, on {what}.", "## Use", *use]
    return _card(data, record, lock, "adapter", [*body, *_training(record, lock, base, losses, reach)])


def _card(
    data: Mapping[str, Any],
    record: Mapping[str, Any],
    lock: Mapping[str, Any],
    relation: str,
    body: Sequence[str],
) -> str:
    """Return a card with its metadata; `relation` is the model's to its base."""
    from huggingface_hub import ModelCardData

    base = Base(record["base"])
    if base.on_hub:
        data = {**data, "base_model": base.id, "base_model_relation": relation}
    paths = [str(source.get("path")) for source in _sources(lock, "train")]
    data = {**data, "datasets": list(dict.fromkeys(_dataset(path) for path in paths if path.startswith(HUB)))}
    ordered = {key: data[key] for key in FIELDS if data.get(key)}
    head = f"---\n{ModelCardData(**ordered).to_yaml(original_order=list(FIELDS))}\n---\n"
    return head + "\n" + "\n\n".join([f"# {_title(record, lock)}", *body, *_origin(record, lock)]) + "\n"


def _transformers(name: str, lock: Mapping[str, Any]) -> str:
    if _section(lock, "data").get("format") == "text":
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
    serve = _section(lock, "serve")
    options = [f"--served-model-name {name}"]
    for key in ("tensor_parallel_size", "max_model_len"):
        if serve.get(key):
            options.append(f"--{key.replace('_', '-')} {serve[key]}")
    return _shell(f"vllm serve {path}", options)


def _peft(name: str, base: Base) -> str:
    revision = f', revision="{base.revision}"' if base.revision else ""
    return f"""\
```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, GenerationConfig

base = AutoModelForCausalLM.from_pretrained("{base.path}"{revision}, dtype="auto")
model = PeftModel.from_pretrained(base, "path/to/{name}-adapter")
model.generation_config = GenerationConfig.from_pretrained("path/to/{name}-adapter")
```"""


def _serving_adapter(name: str, base: Base, config: Mapping[str, Any]) -> Iterator[str]:
    largest = max([int(config.get("r") or 0), *(config.get("rank_pattern") or {}).values()])
    rank = next((rank for rank in ADAPTER_RANKS if rank >= largest), None)
    if rank is None or refused_parts(config):
        return
    options = ["--enable-lora", f"--max-lora-rank {rank}", f"--lora-modules {name}=path/to/{name}-adapter"]
    options.append(f"--generation-config path/to/{name}-adapter")
    if base.revision:
        options.insert(0, f"--revision {base.revision}")
    yield _shell(f"vllm serve {base.path}", options)


LOSSES = (("loss", "training"), ("eval_loss", "evaluation"))
PACKAGES = ("jax", "google-tunix", "qwix", "optax", "orbax-checkpoint", "transformers")
"""Packages whose versions a card lists; recipe.lock.json has all."""


def _title(record: Mapping[str, Any], lock: Mapping[str, Any]) -> str:
    return str(lock.get("name") or (record.get("recipe") or {}).get("name") or "model")


def _training(
    record: Mapping[str, Any],
    lock: Mapping[str, Any],
    base: Base,
    losses: Mapping[str, float] | None,
    reach: Reach | None,
) -> Iterator[str]:
    """Describe what was trained, on which data, and how."""
    train, data = _section(lock, "train"), _section(lock, "data")
    lora = record.get("lora")
    trained = f"{_whole(train.get('trainable_modules'))} of the text model"
    rows = {
        "Base": base.link,
        "Trained": _trained(lora, lock) if lora else trained,
        "LoRA reaches": str(reach or ""),
        "Objective": training_objective(train),
        "Data": ", ".join(map(_source, _sources(lock, "train"))),
        "Evaluated on": ", ".join(map(_source, _sources(lock, "eval"))),
        "Length": _length(train),
        "Batch": _batch(train, data),
        "Optimizer": _optimizer(train),
        "Step": str((record.get("checkpoint") or {}).get("step", "")),
        "Loss": ", ".join(f"{losses[key]:.4f} in {what}" for key, what in LOSSES if losses and key in losses),
    }
    yield "## Training"
    yield _table([(key, value) for key, value in rows.items() if value])


def _whole(only: Sequence[str] | None) -> str:
    return f"the modules {_listed(only)}" if only else "all weights"


def _trained(lora: Mapping[str, Any], lock: Mapping[str, Any]) -> str:
    section, model = _section(lock, "lora"), _section(lock, "model")
    text = f"{'rsLoRA' if lora.get('rslora') else 'LoRA'}, rank {lora['rank']}, alpha {lora['alpha']:g}"
    if section.get("dropout"):
        text += f", dropout {section['dropout']:g}"
    if section.get("layers") not in (None, "all"):
        layers = section["layers"]
        text += f", layers {layers if isinstance(layers, str) else ', '.join(map(str, layers))}"
    if lora.get("rank_pattern") or lora.get("alpha_pattern"):
        text += ", other values in some modules"
    if model.get("quantization"):
        text += f", over weights in {model['quantization']} (QLoRA)"
    return text


def training_objective(train: Mapping[str, Any]) -> str:
    """Return the objective of a recipe's `train` in words, or ""."""
    objective = OBJECTIVES.get(name := str(train.get("objective") or ""))
    if objective is None:
        return name
    return objective.title + settings_of(train)


def _length(train: Mapping[str, Any]) -> str:
    if train.get("steps"):
        return f"{train['steps']:,} steps"
    epochs = train.get("epochs")
    return f"{epochs:g} epoch{'' if epochs == 1 else 's'}" if epochs else ""


def _batch(train: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    if not train.get("global_batch_size"):
        return ""
    text = f"{train['global_batch_size']} {'rows' if data.get('packing') else 'samples'} a step"
    return text + (f", of at most {data['max_length']:,} tokens" if data.get("max_length") else "")


def _optimizer(train: Mapping[str, Any]) -> str:
    optimizer, schedule = train.get("optimizer") or {}, train.get("schedule") or {}
    if not optimizer.get("name"):
        return ""
    text = f"{optimizer['name']}, learning rate {optimizer.get('learning_rate'):g}"
    return text + (f", {schedule['name']} schedule" if schedule.get("name") else "")


def _origin(record: Mapping[str, Any], lock: Mapping[str, Any]) -> Iterator[str]:
    """Describe the recipe, its hashes, and the packages of the run."""
    yield "## Origin"
    recipe, checkpoint = record.get("recipe") or {}, record.get("checkpoint") or {}
    origin = f"Made by the recipe {_code(_title(record, lock))}"
    origin += f" and {lock['compiler']}." if lock.get("compiler") else "."
    yield f"{origin} `{LOCK}` next to this file has all of it."
    hashes = {LOCK: recipe.get("sha256"), "the checkpoint": checkpoint.get("sha256")}
    packages = (lock.get("packages") or {}).get("train") or {}
    plain = {str(name).partition("[")[0]: version for name, version in packages.items()}
    rows = [(f"sha256 of {key}", _code(value)) for key, value in hashes.items() if value]
    rows += [(name, str(plain[name])) for name in PACKAGES if name in plain]
    if rows:
        yield _table(rows)


def _sources(lock: Mapping[str, Any], split: str) -> list[Mapping[str, Any]]:
    sources = _section(lock, "data").get(split) or []
    return [source if isinstance(source, Mapping) else {"path": str(source)} for source in sources]


def _source(source: Mapping[str, Any]) -> str:
    path = str(source.get("path"))
    local = path.removeprefix("file://")
    text = _code(_last(local) if local.startswith(("/", "~")) else path)
    if path.startswith(HUB):
        text = f"[{path.removeprefix(HUB)}]({SITE}/datasets/{_dataset(path)})"
    details = [_code(str(source[key])) for key in ("config", "split") if source.get(key)]
    if source.get("weight") not in (None, 1, 1.0):
        details.append(f"weight {source['weight']:g}")
    return text + (f" ({', '.join(details)})" if details else "")


def _dataset(path: str) -> str:
    """Return OWNER/NAME of hf://OWNER/NAME@REVISION, or of one of its files."""
    return "/".join(address_of(path)[0].split("/")[:2])


def _section(lock: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return (lock.get("recipe") or {}).get(name) or {}


SITE, BAR = "https://huggingface.co", "\\|"
CARRIED = ("pipeline_tag", "license", "license_name", "license_link", "language", "tags")
"""Metadata of the base's card that also hold for a model made from it."""

FRONT_MATTER = 1 << 16
"""Characters of a base's card that are searched for its metadata."""


class Base:
    """The base model as a card names it: `id` is its id on the hub, or the name of its folder; `path` is what
    loads it, or a placeholder; `link` names it in a sentence."""

    def __init__(self, base: Mapping[str, Any]) -> None:
        self.on_hub = _is_hub_id(base["id"])
        self.id: str = base["id"] if self.on_hub else _last(base["id"])
        self.revision: str | None = base.get("revision") if self.on_hub else None
        self.path = self.id if self.on_hub else f"path/to/{self.id}"
        self.link = f"[{self.id}]({SITE}/{self.id})" if self.on_hub else _code(self.id)
        if self.revision:
            self.link += f" at revision {_code(self.revision)}"


def carried(card: str | None) -> dict[str, Any]:
    """Return the metadata of a base's card that also holds for a model made from it; {} if unreadable."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK, RepoCard

    head = (card or "")[:FRONT_MATTER]
    if not REGEX_YAML_BLOCK.search(head):
        return {}
    try:
        data = RepoCard(head, ignore_metadata_errors=True).data
    except Exception:  # the metadata may be anything: the parser raises many kinds of errors
        return {}
    out = {key: _texts(data.get(key)) for key in CARRIED}
    return {key: value for key, value in out.items() if value and (key != "tags" or isinstance(value, list))}


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _texts(value: Any) -> str | list[str] | None:
    if isinstance(value, list):
        return list(dict.fromkeys(item for item in value if isinstance(item, str)))
    return value if isinstance(value, str) else None


def _is_hub_id(model: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return not model.startswith((".", "/", "~"))


def _shell(command: str, options: Sequence[str]) -> str:
    """Format a shell block with a command, an option a line."""
    text = " \\\n    ".join((command, *options))
    return f"```sh\n{text}\n```"


def _listed(names: Sequence[str]) -> str:
    """List the names of what was trained, as code."""
    return ", ".join(map(_code, names)) or "its projections"


def _code(text: str) -> str:
    """Format a code span; the text may contain backticks."""
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return f"{ticks}{space}{text}{space}{ticks}"


def _table(rows: Sequence[tuple[str, str]]) -> str:
    """Format a table of names and values; bars in its cells are escaped."""
    lines = [f"| {name} | {value.replace('|', BAR)} |" for name, value in rows]
    return "\n".join(("| | |", "| --- | --- |", *lines))
