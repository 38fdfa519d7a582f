"""Write port/data/dialects.json: all keys of the tools whose files `recipe port` reads.

    .venv/bin/python -m recipec.port.scripts.dialects WHEELS

WHEELS is a folder with the wheels of the tools listed below, and the archives of ARCHIVES; transformers, trl,
peft and accelerate are installed in this script's environment. Nothing is imported: keys,
types and defaults are read from the sources. A key's entry is [type] if the key is required, otherwise
[type, default]; a default that the source computes is {"is": its expression}.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import json
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

OUTPUT = Path(__file__).resolve().parents[1] / "data" / "dialects.json"

WHEELS = {
    "axolotl": "0.19.0",
    "llamafactory": "0.9.5",
    "torchtune": "0.6.1",
    "litgpt": "0.5.13",
    "maxtext": "0.2.5",
    "oumi": "0.9",
    "ms_swift": "4.6.0",
    "nemo_automodel": "0.7.0",
    "unsloth": "2026.10.9",
}
"""Tools that are read from wheels, and their versions."""

SOURCES = {"open_instruct": "e6c3044aa620"}
"""Tools without releases, and the commit that is read: NAME-COMMIT.zip is the repository as a zip archive.
Without it, what the file has of the tool is kept."""

ARCHIVES = ("llamafactory",)
"""Tools whose source archive is read too, because it has data sets that the wheel lacks."""

VALIDATED = {"dataset_val": ["", None], "run_val_every_n_steps": ["", None], "batch_size_val": ["", None]}
"""Keys of torchtune's distributed recipes that its repository has but no release yet."""
QWEN3 = (
    *(f"{size}_{kind}" for size in ("0_6b", "1_7b", "4b", "8b", "14b") for kind in ("base", "instruct")),
    "32b",
)
"""Builders of Qwen 3, also not released yet, which have the parameters of LIKE."""
LIKE = "torchtune.models.qwen2_5.lora_qwen2_5_7b_base"

LONGEST = 100
"""Length to which a type is cut; Axolotl has types with forty choices."""

Keys = dict[str, list[Any]]


class Package:
    """The sources of one distribution, installed or in a wheel."""

    def __init__(self, name: str, folder: Path | None = None, distribution: str = "") -> None:
        self.name = name
        if folder is None:
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.origin is not None, f"{name} is not installed"
            self.root = Path(spec.origin).parent.parent
            self.version = metadata.version(distribution or name)
            self.wheel = None
        else:
            self.version = SOURCES.get(name) or WHEELS[name]
            (path,) = folder.glob(f"{name}-{self.version}{'.zip' if name in SOURCES else '-*.whl'}")
            self.wheel = zipfile.ZipFile(path)

    def text(self, path: str) -> str:
        """Return the source of a file, by its path in the wheel."""
        if self.wheel is None:
            return (self.root / path).read_text(encoding="utf-8")
        return self.wheel.read(path).decode("utf-8")

    def paths(self, prefix: str, suffix: str) -> list[str]:
        """Return the files of the wheel or of the installed package, sorted."""
        if self.wheel is None:
            names = [path.relative_to(self.root).as_posix() for path in (self.root / self.name).rglob("*.py")]
        else:
            names = self.wheel.namelist()
        return sorted(n for n in names if n.startswith(prefix) and n.endswith(suffix))

    def tree(self, path: str) -> ast.Module:
        """Return a file's syntax tree."""
        return ast.parse(self.text(path))

    def classes(self, *paths: str) -> dict[str, ast.ClassDef]:
        """Return the classes of some files, by name."""
        return {
            node.name: node
            for path in paths
            for node in self.tree(path).body
            if isinstance(node, ast.ClassDef)
        }


def main() -> int:
    OUTPUT.write_text(text(catalog(Path(sys.argv[1]))), encoding="utf-8")
    return 0


def catalog(wheels: Path) -> dict[str, Any]:
    """Return all tools: {"trl": {"version": ..., "sections": {"sft": {key: entry}}}}."""
    transformers, trl, peft = Package("transformers"), Package("trl"), Package("peft")
    training = transformers.classes("transformers/training_args.py", "transformers/training_args_seq2seq.py")
    return {
        "axolotl": _axolotl(Package("axolotl", wheels)),
        "llamafactory": _llamafactory(Package("llamafactory", wheels), training, wheels),
        "llamafactory_v1": _llamafactory_v1(Package("llamafactory", wheels), wheels),
        "trl": _trl(trl, training),
        "trainer": {
            "version": transformers.version,
            "sections": {"training_arguments": fields(training, "TrainingArguments")},
        },
        "peft": _peft(peft),
        "accelerate": _accelerate(Package("accelerate")),
        "torchtune": _torchtune(Package("torchtune", wheels)),
        "litgpt": _litgpt(Package("litgpt", wheels)),
        "maxtext": _maxtext(Package("maxtext", wheels)),
        "oumi": _oumi(Package("oumi", wheels)),
        "automodel": _automodel(Package("nemo_automodel", wheels)),
        "swift": _swift(Package("ms_swift", wheels), training),
        "tunix": _tunix(Package("tunix", distribution="google-tunix"), Package("optax")),
        "open_instruct": kept(wheels, "open_instruct", OUTPUT, _open_instruct),
    }


def kept(wheels: Path, name: str, file: Path, read: Callable[[Package], dict[str, Any]]) -> dict[str, Any]:
    """Return what a file has of a tool of SOURCES, anew if its archive is in the folder."""
    if (wheels / f"{name}-{SOURCES[name]}.zip").is_file():
        return read(Package(name, wheels))
    entry: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))[name]
    return entry


def text(data: Mapping[str, Any]) -> str:
    """Return the file's text, one key a line."""
    lines = ["{"]
    for tool, entry in data.items():
        lines.append(f' {_json(tool)}: {{"version": {_json(entry["version"])}, "sections": {{')
        for section, keys in entry["sections"].items():
            inner = [f"   {_json(key)}: {_json(value)}," for key, value in keys.items()]
            if len(inner) <= 12:
                lines.append(f"  {_json(section)}: {{{' '.join(line.strip() for line in inner)[:-1]}}},")
            else:
                lines += [f"  {_json(section)}: {{", *inner[:-1], inner[-1][:-1], "  },"]
        lines[-1] = lines[-1][:-1]
        lines.append(" }},")
    lines[-1] = lines[-1][:-1]
    return "\n".join([*lines, "}"]) + "\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _axolotl(package: Package) -> dict[str, Any]:
    classes = package.classes(*package.paths("axolotl/utils/schemas/", ".py"))
    plugins = package.classes(*package.paths("axolotl/integrations/", "args.py"))
    sections = {"config": fields(classes, "AxolotlInputConfig")}
    mixed = set(lineage(classes, "AxolotlInputConfig"))
    for name in sorted(classes):
        if name not in mixed and fields(classes, name) and name != "AxolotlConfigWCapabilities":
            sections[name] = fields(classes, name)
    sections["plugins"] = {
        key: entry for name in sorted(plugins) for key, entry in fields(plugins, name).items()
    }
    return {"version": package.version, "sections": sections}


def _archived(folder: Path, package: Package, pattern: str) -> dict[str, Any]:
    """Return the YAML or JSON files of a tool's source archive, by path."""
    root = f"{package.name}-{package.version}"
    with tarfile.open(folder / f"{root}.tar.gz") as archive:
        names = {
            member.name.removeprefix(f"{root}/"): archive.extractfile(member)
            for member in archive
            if PurePosixPath(member.name).match(f"{root}/{pattern}")
        }
        return {path: yaml.safe_load(file.read()) for path, file in sorted(names.items()) if file}


def _llamafactory(package: Package, training: Mapping[str, ast.ClassDef], archives: Path) -> dict[str, Any]:
    """Return the arguments, the keys of an entry of dataset_info.json, and the repository's entries."""
    classes = package.classes(*package.paths("llamafactory/hparams/", "_args.py"))
    ours = {("Ours" if name == "TrainingArguments" else name): node for name, node in classes.items()}
    keys = dict(fields(training, "Seq2SeqTrainingArguments"))
    for name in ("Ours", "ModelArguments", "DataArguments", "FinetuningArguments", "GeneratingArguments"):
        keys |= fields(ours, name)
    attributes = package.classes("llamafactory/data/parser.py")
    (info,) = _archived(archives, package, "data/dataset_info.json").values()
    return {
        "version": package.version,
        "sections": {
            "train": keys,
            "dataset_attributes": fields(attributes, "DatasetAttr"),
            "datasets": {name: ["", entry] for name, entry in info.items()},
        },
    }


def _llamafactory_v1(package: Package, archives: Path) -> dict[str, Any]:
    classes = package.classes(*package.paths("llamafactory/v1/config/", "_args.py"))
    names = ("ModelArguments", "DataArguments", "TrainingArguments", "SampleArguments")
    keys = {key: entry for name in names for key, entry in fields(classes, name).items()}
    files = _archived(archives, package, "data/v1_*.yaml")
    sections = {"args": keys, "datasets": {path: ["", entries] for path, entries in files.items()}}
    return {"version": package.version, "sections": sections}


def _trl(package: Package, training: Mapping[str, ast.ClassDef]) -> dict[str, Any]:
    """Return the keys of every script; for scripts that cannot be ported, without the keys of all scripts."""
    scripts = [path for path in package.paths("trl/scripts/", ".py") if "vllm" not in path]
    configs = package.paths("trl/trainer/", "_config.py")
    experimental = package.paths("trl/experimental/", "_config.py")
    known = dict(training) | package.classes(*configs, *experimental, *scripts)
    names = {
        "sft": "SFTConfig",
        "dpo": "DPOConfig",
        "orpo": "ORPOConfig",
        "cpo": "CPOConfig",
        "kto": "KTOConfig",
        "grpo": "GRPOConfig",
        "rloo": "RLOOConfig",
        "gkd": "GKDConfig",
        "script": "ScriptArguments",
        "model": "ModelConfig",
        "mixture": "DatasetMixtureConfig",
        "dataset": "DatasetConfig",
    }
    sections = {key: fields(known, name) for key, name in names.items()}
    for key in ("grpo", "rloo"):
        sections[key] |= fields(known, f"{key.upper()}ScriptArguments")
    bases = ("_BaseConfig", "ScriptArguments", "ModelConfig")
    shared = {key for name in bases for key in fields(known, name)}
    for prefix, paths in (("", configs), ("experimental.", experimental)):
        for path in paths:
            (name,) = package.classes(path)
            script = Path(path).stem.removesuffix("_config")
            if name in names.values() or name == "_BaseConfig":
                continue
            keys = fields(known, name)
            if not prefix and f"{script.upper()}ScriptArguments" in known:
                keys |= fields(known, f"{script.upper()}ScriptArguments")
            sections[prefix + script] = {key: entry for key, entry in keys.items() if key not in shared}
    return {"version": package.version, "sections": sections}


OF_OPEN_INSTRUCT: Mapping[str, tuple[tuple[str, str], ...]] = {
    "grpo": (
        ("grpo_utils", "GRPOExperimentConfig"),
        ("model_utils", "ModelConfig"),
        ("data_loader", "StreamingDataLoaderConfig"),
        ("data_loader", "VLLMConfig"),
        ("environments/tools/utils", "EnvsConfig"),
    ),
    "sft": (("finetune", "FlatArguments"),),
    "dpo": (("dpo_utils", "DPOExperimentConfig"),),
}
"""The modules and classes of arguments of open-instruct's scripts, besides the tokenizer's."""


def _open_instruct(package: Package) -> dict[str, Any]:
    shared = package.classes("open_instruct/olmo_core_utils.py")
    sections: dict[str, Keys] = {}
    for script, parts in OF_OPEN_INSTRUCT.items():
        sections[script] = {}
        for module, name in (*parts, ("dataset_transformation", "TokenizerConfig")):
            classes = package.classes(f"open_instruct/{module}.py")
            sections[script] |= fields({**shared, **classes}, name)
    return {"version": package.version, "sections": sections}


def _peft(package: Package) -> dict[str, Any]:
    classes = package.classes("peft/config.py", "peft/tuners/lora/config.py")
    return {"version": package.version, "sections": {"lora": fields(classes, "LoraConfig")}}


def _accelerate(package: Package) -> dict[str, Any]:
    classes = package.classes("accelerate/commands/config/config_args.py")
    sections = {"cluster": fields(classes, "ClusterConfig"), "sagemaker": fields(classes, "SageMakerConfig")}
    flags = dict(_flags(package.tree("accelerate/commands/launch.py")))
    for prefix in ("fsdp_", "parallelism_config_", "fp8_", "dynamo_", "megatron_lm_", "mpirun_"):
        sections[prefix.rstrip("_")] = {key: flags[key] for key in flags if key.startswith(prefix)}
    sections["launch"] = dict(sorted(flags.items()))
    deepspeed = ("deepspeed_", "zero", "offload_", "gradient_")
    sections["deepspeed"] = {key: flags[key] for key in flags if key.startswith(deepspeed)}
    return {"version": package.version, "sections": sections}


def _torchtune(package: Package) -> dict[str, Any]:
    sections: dict[str, Keys] = {}
    for recipe in ("full_finetune", "lora_finetune", "lora_dpo", "full_dpo"):
        for where in ("single_device", "distributed"):
            path = f"recipes/{recipe}_{where}.py"
            if path in package.paths("recipes/", ".py"):
                sections[f"{recipe}_{where}"] = _read_of_cfg(package.tree(path))
    modules = [
        path for path in package.paths("torchtune/models/", "_model_builders.py") if "clip" not in path
    ]
    modules += [path for path in package.paths("torchtune/datasets/_", ".py") if "__init__" not in path]
    modules += package.paths("torchtune/training/lr_schedulers", ".py")
    built: dict[str, Keys] = {}
    for path in modules:
        folder = (
            path.rsplit("/", 1)[0] if path.rsplit("/", 1)[1].startswith("_") else path.removesuffix(".py")
        )
        builders = functions(package.tree(path), built)
        built |= builders
        for name, keys in builders.items():
            sections[f"{folder.replace('/', '.')}.{name}"] = keys
    for name in ("full_finetune_distributed", "lora_finetune_distributed"):
        sections[name] = dict(sorted({**sections[name], **VALIDATED}.items()))
    for name in QWEN3:
        sections[f"torchtune.models.qwen3.qwen3_{name}"] = {}
        sections[f"torchtune.models.qwen3.lora_qwen3_{name}"] = sections[LIKE]
    return {"version": package.version, "sections": sections}


def _litgpt(package: Package) -> dict[str, Any]:
    args = package.classes("litgpt/args.py")
    sections = {
        name: functions(package.tree(f"litgpt/finetune/{name}.py"))["setup"] for name in ("lora", "full")
    }
    sections |= {name[:-4].lower(): fields(args, name) for name in ("TrainArgs", "EvalArgs", "LogArgs")}
    data = package.classes(*package.paths("litgpt/data/", ".py"))
    for name in sorted(data):
        if "DataModule" in _bases(data, name):
            sections[f"litgpt.data.{name}"] = fields(data, name)
    sections["styles"] = _styles(package.tree("litgpt/prompts.py"))
    return {"version": package.version, "sections": sections}


MARK = "\N{WHITE SQUARE}"


def _styles(module: ast.Module) -> Keys:
    """Return what litgpt's prompt styles write before an answer, by name: str.format templates with
    {instruction}. The classes of this one file are executed, without any import."""
    kept: list[ast.stmt] = [node for node in module.body if isinstance(node, ast.ClassDef | ast.AnnAssign)]
    namespace: dict[str, Any] = {"dumps": json.dumps, "abstractmethod": lambda method: method}
    future = compile("from __future__ import annotations", "", "exec").co_flags
    exec(compile(ast.Module(kept, []), "prompts.py", "exec", future, dont_inherit=True), namespace)
    styles: Keys = {}
    for name, style in namespace["prompt_styles"].items():
        text = style().apply(MARK, input=MARK)
        if text.count(MARK) == 1:
            styles[name] = ["str", text.replace("{", "{{").replace("}", "}}").replace(MARK, "{instruction}")]
    return styles


def _maxtext(package: Package) -> dict[str, Any]:
    """Return the configuration's groups with base.yml's defaults, those of sft.yml, and its models' ids."""
    classes = package.classes("maxtext/configs/types.py")
    base, sft = (yaml.safe_load(package.text(f"maxtext/configs/{n}.yml")) for n in ("base", "post_train/sft"))
    groups = [*_named(classes["MaxTextConfig"].bases), "LoRA", "DPO"]
    sections = {
        name: {
            key: [entry[0], _plain(base[key])] if key in base else entry
            for key, entry in fields({name: classes[name]}, name).items()
        }
        for name in groups
        if name != "DerivedValues"
    }
    sections["sft"] = {key: ["", value] for key, value in sft.items() if not isinstance(value, dict)}
    (ids,) = (
        node.value
        for node in package.tree("maxtext/utils/globals.py").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "HF_IDS"
    )
    assert isinstance(ids, ast.Dict)
    named = {_value(key): _value(value) for key, value in zip(ids.keys, ids.values, strict=True) if key}
    sections["models"] = {key: ["str", value] for key, value in named.items() if isinstance(value, str)}
    weight = "load_balance_loss_weight"
    paths = package.paths("maxtext/configs/models/", ".yml")
    read = {Path(path).stem: yaml.safe_load(package.text(path)) for path in paths}
    sections["balance"] = {name: ["float", keys[weight]] for name, keys in read.items() if weight in keys}
    return {"version": package.version, "sections": sections}


def _plain(value: Any) -> Any:
    """Return a default of base.yml, where None can also be a string; a long table becomes its name."""
    if value == "None":
        return None
    return value if len(json.dumps(value)) <= LONGEST else {"is": "base.yml"}


def _automodel(package: Package) -> dict[str, Any]:
    root = "nemo_automodel/components"
    paths = [f"{root}/_peft/lora.py", f"{root}/optim/optimizer.py", f"{root}/datasets/llm/chat_dataset.py"]
    paths += [f"{root}/datasets/llm/squad.py", f"{root}/datasets/llm/hellaswag.py"]
    classes = package.classes(*paths)
    (steps,) = (
        node
        for node in ast.walk(package.tree(f"{root}/training/step_scheduler.py"))
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    parameters = ("self", "dp_size", "dataloader", "process_group")
    sections = {
        "step_scheduler": {key: e for key, e in _parameters(steps.args) if key not in parameters},
        "peft": fields(classes, "PeftConfig"),
        "lr_scheduler": fields(classes, "LRSchedulerConfig"),
        "chat": fields(classes, "ChatDatasetConfig"),
        "squad": fields(classes, "SquadConfig"),
        "hellaswag": fields(classes, "HellaSwagConfig"),
    }
    return {"version": package.version, "sections": sections}


SWIFT_MODELS = ("llama", "gemma", "mistral", "microsoft", "qwen", "glm")
"""Modules of ms-swift with families that recipes know, whose ids on ModelScope may differ."""


def _swift(package: Package, training: Mapping[str, ast.ClassDef]) -> dict[str, Any]:
    """Return the arguments of sft and rlhf, and ms-swift's Hugging Face ids by ModelScope id.

    An entry of a data set is [what reads its rows, the id]; the first is "" if columns decide.
    """
    paths = [*package.paths("swift/arguments/", "_args.py"), "swift/trainers/arguments.py"]
    classes = {**training, **package.classes(*paths)}
    classes["HfSeq2SeqTrainingArguments"] = training["Seq2SeqTrainingArguments"]
    mixin = fields(classes, "TrainArgumentsMixin")
    sft = {**fields(training, "Seq2SeqTrainingArguments"), **mixin, **fields(classes, "SftArguments")}
    rlhf_fields = fields(classes, "RLHFArguments")
    rlhf = {
        key: entry
        for key, entry in rlhf_fields.items()
        if key not in sft or key in ("loss_scale", "loss_type")
    }
    models, sets = {}, {}
    for name in SWIFT_MODELS:
        for call in calls(package.tree(f"swift/model/models/{name}.py"), "Model"):
            ids = [_value(argument) for argument in call.args]
            if len(ids) == 2 and all(isinstance(identifier, str) for identifier in ids) and ids[0] != ids[1]:
                models[ids[0]] = ["", ids[1]]
    for call in calls(package.tree("swift/dataset/dataset/llm.py"), "DatasetMeta"):
        words = {word.arg: word.value for word in call.keywords}
        if "ms_dataset_id" in words:
            reads = "SubsetDataset" if "SubsetDataset" in ast.unparse(call) else ""
            reads = ast.unparse(words["preprocess_func"]) if "preprocess_func" in words else reads
            known = _value(words["hf_dataset_id"]) if "hf_dataset_id" in words else None
            sets[_value(words["ms_dataset_id"])] = [_short(_columned(reads)), known]
    for row in json.loads(package.text("swift/dataset/data/dataset_info.json")):
        if "ms_dataset_id" in row:
            sets[row["ms_dataset_id"]] = [
                _short(_json(row["columns"])) if "columns" in row else "",
                row.get("hf_dataset_id"),
            ]
    sections = {"sft": sft, "rlhf": rlhf, "models": models, "datasets": sets}
    return {"version": package.version, "sections": sections}


def calls(module: ast.Module, name: str) -> Iterator[ast.Call]:
    return (n for n in ast.walk(module) if isinstance(n, ast.Call) and ast.unparse(n.func) == name)


def _columned(reads: str) -> str:
    """Return "" for what reads rows by their columns without arguments, as most data sets do."""
    return "" if reads in ("AutoPreprocessor()", "MessagesPreprocessor()", "AlpacaPreprocessor()") else reads


OUMI = {
    "training": "TrainingParams",
    "model": "ModelParams",
    "peft": "PeftParams",
    "fsdp": "FSDPParams",
    "deepspeed": "DeepSpeedParams",
    "split": "DatasetSplitParams",
    "dataset": "DatasetParams",
    "config": "TrainingConfig",
}


def _oumi(package: Package) -> dict[str, Any]:
    paths = package.paths("oumi/core/configs/params/", "_params.py")
    classes = package.classes("oumi/core/configs/training_config.py", *paths)
    return {
        "version": package.version,
        "sections": {section: fields(classes, name) for section, name in OUMI.items()},
    }


TUNIX: Mapping[str, Mapping[str, Any]] = {
    "config": {
        **{"data_source": "tfds", "data_directory": "", "data_module": ""},
        **{"apply_chat_template_to_dataset": True, "dataset_name": "Helsinki-NLP/opus-100"},
        **{"batch_size": 16, "max_target_length": 256, "num_train_epochs": 1, "train_fraction": 1.0},
        **{"num_test_batches": 100, "tfds_download": True, "num_batches": 0},
        **{"rollout_engine": "vanilla", "vllm_config": {}, "sglang_jax_config": {}, "offload_to_cpu": False},
        **{"verl_compatible": False, "reward_functions": ["tunix/cli/reward_fn/gsm8k.py"]},
    },
    "model": {
        **{"model_name": "llama-3.1-8b", "model_id": "meta-llama/Llama-3.1-8B"},
        **{"model_source": "huggingface", "model_path": "", "model_download_path": "/tmp/models"},
        **{"rng_seed": 0, "model_display": False, "intermediate_ckpt_dir": "/tmp/intermediate_ckpt/"},
        **{"use_flash_attention": False, "flash_attention_block_size": 1024, "remat_config": 1},
    },
    "mesh": {"shape": "(2,2)", "axis_names": "('fsdp','tp')", "allocation_policy": "COMPACT"},
    "lora": dict.fromkeys(("module_path", "rank", "alpha", "tile_size", "weight_qtype")),
    "tokenizer": {
        **{"tokenizer_path": "meta-llama/Llama-3.1-8B", "tokenizer_type": "huggingface"},
        **{"add_bos": True, "add_eos": True},
    },
    "optimizer": {
        **{"learning_rate": 1e-5, "opt_type": "adamw", "schedule_type": "warmup_cosine_decay_schedule"},
        **{"value": 1e-5, "peak_value": 3e-5, "init_value": 0.0, "end_value": 0.0, "warmup_ratio": 0.1},
        **{"b1": 0.9, "b2": 0.99, "weight_decay": 0.1, "warmup_steps": 5, "decay_steps": 10},
        "max_grad_norm": 0.1,
    },
    "training": {
        **{"eval_every_n_steps": 2, "max_steps": 10, "gradient_accumulation_steps": 1},
        **{"checkpoint_root_directory": "/tmp/ckpts", "data_sharding_axis": ["fsdp"]},
        "checkpointing_options": {"max_to_keep": 1, "save_interval_steps": 180},
    },
}
"""base_config.yaml's contents in Tunix's repository at the installed version; no release has the file."""
OPTAX = (
    *("adam", "adamw", "lion", "sgd", "constant_schedule", "cosine_decay_schedule", "linear_schedule"),
    *("warmup_constant_schedule", "warmup_cosine_decay_schedule"),
)
"""Functions whose parameters can be in optimizer_config."""


def _tunix(package: Package, optax: Package) -> dict[str, Any]:
    """Return base_config.yaml's values, the sections that replace them, and the parameters of optax."""
    classes = package.classes("tunix/sft/peft_trainer.py", "tunix/sft/metrics_logger.py")
    schedules = functions(optax.tree("optax/_src/alias.py")) | functions(
        optax.tree("optax/schedules/_schedule.py")
    )
    return {
        "version": package.version,
        "sections": {
            **{name: {key: ["", value] for key, value in keys.items()} for name, keys in TUNIX.items()},
            "training_config": fields(classes, "TrainingConfig"),
            "metrics_logging_options": fields(classes, "MetricsLoggerOptions"),
            **{name: schedules[name] for name in OPTAX},
        },
    }


def fields(classes: Mapping[str, ast.ClassDef], name: str) -> Keys:
    """Return the fields of a dataclass or a Pydantic model, those of its bases first."""
    out: Keys = {}
    for base in reversed(lineage(classes, name)):
        for node in classes[base].body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                key, kind = node.target.id, ast.unparse(node.annotation)
                if key.startswith("_") or key == "model_config" or kind.startswith("ClassVar"):
                    continue
                if _given(node.value):
                    out[key] = [_short(kind), *_default(node.value)]
    return out


def functions(module: ast.Module, imported: Mapping[str, Keys] | None = None) -> dict[str, Keys]:
    """Return the parameters of a module's public functions, of their aliases, and of partials of them.

    Args:
        imported: functions of other modules, to which names may refer.
    """
    out: dict[str, Keys] = {}
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            out[node.name] = dict(_parameters(node.args))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            target, other = node.targets[0], node.value.id
            if isinstance(target, ast.Name) and other in {**(imported or {}), **out}:
                out[target.id] = {**(imported or {}), **out}[other]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            call, target = node.value, node.targets[0]
            if ast.unparse(call.func) != "partial" or not isinstance(target, ast.Name):
                continue
            arguments = {word.arg: _value(word.value) for word in call.keywords}
            keys = out[ast.unparse(call.args[0])]
            out[target.id] = {
                key: [entry[0], arguments[key]] if key in arguments else entry for key, entry in keys.items()
            }
    return out


def _parameters(arguments: ast.arguments) -> Iterator[tuple[str, list[Any]]]:
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    for argument, default in zip(
        [*plain, *arguments.kwonlyargs], [*defaults, *arguments.kw_defaults], strict=True
    ):
        kind = ast.unparse(argument.annotation) if argument.annotation else ""
        yield argument.arg, [_short(kind), *([] if default is None else [_value(default)])]


def _flags(module: ast.Module) -> Iterator[tuple[str, list[Any]]]:
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument"):
            names = [_value(argument) for argument in node.args]
            long = [name for name in names if str(name).startswith("--")]
            words = {word.arg: word.value for word in node.keywords}
            kind = ast.unparse(words["type"]) if "type" in words else ""
            if "action" in words:
                kind = "bool"
            default = _value(words["default"]) if "default" in words else (False if kind == "bool" else None)
            if long:
                yield long[0].removeprefix("--"), [kind, default]


def _read_of_cfg(module: ast.Module) -> Keys:
    """Return the keys that a torchtune recipe reads from its `cfg`: attributes, and `get` with a default."""
    out: Keys = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "cfg" and node.attr != "get":
            out.setdefault(node.attr, [""])
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "cfg.get":
            name, *rest = [_value(argument) for argument in node.args]
            rest += [_value(word.value) for word in node.keywords]
            if isinstance(name, str):
                out[name] = ["", rest[0] if rest else None]
    return dict(sorted(out.items()))


def _given(value: ast.expr | None) -> bool:
    """Return whether a field can be set; with dataclasses' init=False it cannot."""
    if not isinstance(value, ast.Call):
        return True
    words = {word.arg: word.value for word in value.keywords}
    return "init" not in words or ast.unparse(words["init"]) != "False"


def _default(value: ast.expr | None) -> list[Any]:
    """Return [default] of a field, or [] if it is required."""
    if value is None:
        return []
    if not (isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in ("field", "Field")):
        return [_value(value)]
    words = {word.arg: word.value for word in value.keywords}
    if "default" in words:
        return [_value(words["default"])]
    if "default_factory" in words:
        return [_made(words["default_factory"])]
    first = value.args[:1]
    return [_value(first[0])] if first and not _is_ellipsis(first[0]) else []


def _made(factory: ast.expr) -> Any:
    if isinstance(factory, ast.Lambda):
        return _value(factory.body)
    name = ast.unparse(factory)
    return getattr(builtins, name)() if name in ("list", "dict") else {"is": f"{name}()"}


def _value(node: ast.expr) -> Any:
    """Return a literal's value, or the expression's text."""
    try:
        value = ast.literal_eval(node)
        json.dumps(value)
    except (ValueError, TypeError):
        return {"is": ast.unparse(node)}
    return value


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is Ellipsis


def _short(kind: str) -> str:
    return kind if len(kind) <= LONGEST else kind[: LONGEST - 3] + "..."


def lineage(classes: Mapping[str, ast.ClassDef], name: str) -> list[str]:
    """Return a class and its bases, depth first, a class before its bases."""
    seen: dict[str, None] = {name: None}
    for base in _named(classes[name].bases):
        if base in classes:
            seen |= dict.fromkeys(lineage(classes, base))
    return list(seen)


def _bases(classes: Mapping[str, ast.ClassDef], name: str) -> set[str]:
    bases = set(_named(classes[name].bases))
    return bases.union(*(_bases(classes, base) for base in bases if base in classes)) if bases else bases


def _named(bases: Iterable[ast.expr]) -> list[str]:
    return [ast.unparse(base).split(".")[-1] for base in bases]


if __name__ == "__main__":
    sys.exit(main())
