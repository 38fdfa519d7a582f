"""The tools of same_run.py: how each one runs, its base config, and what each feature adds to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from recipec.port.dialects import axolotl_data, llamafactory, swift, torchtune

STEPS = 10

Config = Mapping[str, Any]


TAGS = {f"{name}_tag": name for name in ("role", "content", "user", "assistant", "system")}
"""LLaMA-Factory's settings for messages with role and content."""


def as_yaml(config: Config) -> str:
    return yaml.safe_dump(dict(config), sort_keys=False)


@dataclass(frozen=True)
class Tool:
    """A tool, and how to run it.

    Attributes:
        package: its distribution.
        command: the tool's own command, run in the folder of its files.
        config: the base config of every run; a feature adds to it.
        features: keys that each feature sets, by its name; None removes a key.
        commands: commands of features that need another one.
        says: for features whose runs differ, what the port's report says about it.
        files: the files to port, the config first.
        beside: further files by path.
        model: a catalog's model; a miniature of it is trained.
        place: the folder of the miniature.
        before: a command to run first.
        prepare: adds files next to the miniature.
        write: converts a config to its file's text.
        environment: additional environment variables.
    """

    package: str
    command: Sequence[str]
    config: Config
    features: Mapping[str, Config]
    commands: Mapping[str, Sequence[str]] = field(default_factory=dict)
    says: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[str] = ("run.yaml",)
    beside: Mapping[str, str] = field(default_factory=dict)
    model: str = "Qwen/Qwen3-0.6B"
    place: str = "model"
    before: Sequence[Sequence[str]] = ()
    prepare: Callable[[Path], None] = lambda model: None
    write: Callable[[Config], str] = as_yaml
    environment: Mapping[str, str] = field(default_factory=dict)


def of_json(**more: Any) -> Config:
    """Return litgpt's data module of a file."""
    settings = {"json_path": "data/split", "num_workers": 0}
    return {"class_path": "litgpt.data.JSON", "init_args": {**settings, **more}}


HF: Config = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "max_steps": STEPS,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.01,
    "logging_steps": 1,
    "output_dir": "out",
    "report_to": "none",
    "save_strategy": "no",
}
"""Settings that tools based on transformers' Trainer share."""

LLAMAFACTORY = Tool(
    "llamafactory",
    ("llamafactory-cli", "train", "run.yaml"),
    {
        "model_name_or_path": "./model",
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora",
        "lora_rank": 4,
        "lora_alpha": 12,
        "lora_target": "all",
        "dataset": "plain",
        "dataset_dir": "data",
        "template": "qwen3_nothink",
        "cutoff_len": 256,
        "disable_shuffling": True,
        **HF,
    },
    {
        "plain": {},
        "no accumulation": {"gradient_accumulation_steps": 1, "dataset": "chat"},
        "warm-up": {"warmup_ratio": 0.25},
        "turns": {"dataset": "chat"},
        "mask_history": {"dataset": "chat", "mask_history": True},
        "shuffled": {"disable_shuffling": None},
        "cut": {"dataset": "chat", "cutoff_len": 48},
        "epochs": {"max_steps": None, "num_train_epochs": 2},
        "packing": {"dataset": "even", "packing": True, "neat_packing": True, "cutoff_len": 80},
        "template default": {"template": "default", "dataset": "chat"},
        "own template": {"template": None, "dataset": "chat"},
        "dpo": {"stage": "dpo", "dataset": "pairs"},
    },
    says={"cut": llamafactory.CUT, "own template": llamafactory.OWN},
    files=("run.yaml", "data/dataset_info.json"),
    beside={
        "data/dataset_info.json": json.dumps(
            {
                **{name: {"file_name": f"{name}.jsonl"} for name in ("plain", "even")},
                "chat": {
                    "file_name": "chat.jsonl",
                    "formatting": "sharegpt",
                    "columns": {"messages": "messages"},
                    "tags": TAGS,
                },
                "pairs": {
                    "file_name": "pairs.jsonl",
                    "formatting": "sharegpt",
                    "ranking": True,
                    "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
                    "tags": TAGS,
                },
            },
            indent=1,
        )
    },
)

SWIFT = Tool(
    "ms-swift",
    ("swift", "sft", "run.yaml"),
    {
        "model": "./model",
        "model_type": "qwen3",
        "template": "qwen3",
        "tuner_type": "lora",
        "lora_rank": 4,
        "lora_alpha": 12,
        "lora_dropout": 0,
        "target_modules": ["all-linear"],
        "torch_dtype": "float32",
        **dict.fromkeys(("fp16", "bf16"), False),
        "dataset": ["data/chat.jsonl"],
        "split_dataset_ratio": 0,
        "dataset_shuffle": False,
        "train_dataloader_shuffle": False,
        "max_length": 256,
        **{**HF, "report_to": ["none"]},
    },
    {
        "plain": {},
        "no accumulation": {"gradient_accumulation_steps": 1},
        "warm-up": {"warmup_ratio": 0.25},
        "shuffled": {"dataset_shuffle": None, "train_dataloader_shuffle": None},
        "last_round": {"loss_scale": "last_round"},
        "dropped": {"max_length": 80},
        "cut": {"max_length": 48, "truncation_strategy": "right"},
        "epochs": {"max_steps": None, "num_train_epochs": 2},
        "template qwen2_5": {"template": "qwen2_5"},
        "dpo": {"rlhf_type": "dpo", "dataset": ["data/rejected.jsonl"]},
    },
    commands={"dpo": ("swift", "rlhf", "run.yaml")},
    says={"cut": swift.CUT_OFF, "dpo": swift.BOTH},
)

OF_LITGPT: Config = {
    "epochs": 1,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "max_steps": STEPS,
    "lr_warmup_steps": 1,
    "max_seq_length": 256,
    "save_interval": 1000,
    "log_interval": 1,
}


def as_litgpt_reads(model: Path) -> None:
    """Give the miniature Qwen 3's bos_token; litgpt omits it if a text already starts with it."""
    path = model / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "bos_token_id": 0}))


LITGPT = Tool(
    "litgpt",
    ("litgpt", "finetune_lora", "--config", "run.yaml"),
    {
        "checkpoint_dir": "checkpoints/Qwen/Qwen3-0.6B",
        "out_dir": "out",
        "precision": "32-true",
        **{"lora_r": 4, "lora_alpha": 12, "lora_dropout": 0.0},
        **{f"lora_{part}": True for part in ("query", "key", "value", "projection", "mlp")},
        "data": of_json(),
        "train": OF_LITGPT,
        "eval": {"interval": 1000, "max_iters": 1, "max_new_tokens": 1},
        "optimizer": {
            "class_path": "torch.optim.AdamW",
            "init_args": {"lr": 1e-3, "weight_decay": 0.01, "betas": [0.9, 0.95]},
        },
    },
    {
        "plain": {},
        "mask_prompt": {"data": of_json(mask_prompt=True)},
        "no accumulation": {"train": {**OF_LITGPT, "micro_batch_size": 4}},
        "warm-up": {"train": {**OF_LITGPT, "lr_warmup_steps": 3}},
        "cut": {"train": {**OF_LITGPT, "max_seq_length": 64}},
        "chatml": {"data": of_json(prompt_style="qwen3")},
    },
    place="checkpoints/Qwen/Qwen3-0.6B",
    prepare=as_litgpt_reads,
    before=[("litgpt", "convert_to_litgpt", "checkpoints/Qwen/Qwen3-0.6B", "--model_name", "Qwen3-0.6B")],
)

QWEN2_SPLITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
"""The pattern with which Qwen 2's tokenizer, and torchtune's copy, split texts before merging bytes."""


def as_torchtune_reads(model: Path) -> None:
    """Write the tokenizer in the form of Qwen's files, with the two tokens that torchtune needs."""
    path = model / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    like, known = tokenizer["added_tokens"][-1], tokenizer["model"]["vocab"]
    for number, content in enumerate(("<tool_call>", "</tool_call>"), len(known)):
        tokenizer["added_tokens"].append({**like, "id": number, "content": content})
    pieces = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    splits = {"type": "Split", "pattern": {"Regex": QWEN2_SPLITS}, "behavior": "Isolated", "invert": False}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [splits, pieces]}
    path.write_text(json.dumps(tokenizer))
    (model / "vocab.json").write_text(json.dumps(known))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    (model / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")


def of_chats(**more: Any) -> Config:
    """Return torchtune's data set of a file."""
    settings = {"source": "json", "data_files": "data/chat.jsonl", "split": "train"}
    columns = {"conversation_column": "messages", "conversation_style": "openai"}
    return {"_component_": "torchtune.datasets.chat_dataset", **settings, **columns, **more}


QWEN2_5 = "checkpoints/Qwen2.5-0.5B-Instruct"
OF_TOKENIZER: Config = {
    "_component_": "torchtune.models.qwen2_5.qwen2_5_tokenizer",
    "path": f"{QWEN2_5}/vocab.json",
    "merges_file": f"{QWEN2_5}/merges.txt",
    "special_tokens_path": f"{QWEN2_5}/tokenizer.json",
    "max_seq_len": 256,
}
TORCHTUNE = Tool(
    "torchtune",
    ("tune", "run", "lora_finetune_single_device", "--config", "run.yaml"),
    {
        "model": {
            "_component_": "torchtune.models.qwen2_5.lora_qwen2_5_0_5b",
            "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
            "apply_lora_to_mlp": True,
            **{"lora_rank": 4, "lora_alpha": 12, "lora_dropout": 0.0},
        },
        "tokenizer": OF_TOKENIZER,
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": QWEN2_5,
            "checkpoint_files": [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)],
            "recipe_checkpoint": None,
            "output_dir": "out",
            "model_type": "QWEN2",
        },
        "dataset": of_chats(),
        **{"seed": 5, "shuffle": False, "batch_size": 2, "epochs": 1, "max_steps_per_epoch": STEPS},
        "gradient_accumulation_steps": 2,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3, "weight_decay": 0.01},
        "lr_scheduler": {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 2,
        },
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        **{"device": "cpu", "dtype": "fp32", "compile": False, "resume_from_checkpoint": False},
        **{"enable_activation_checkpointing": False, "enable_activation_offloading": False},
        "metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": "out"},
        **{"output_dir": "out", "log_every_n_steps": 1, "log_peak_memory_stats": False},
        "save_adapter_weights_only": True,
    },
    {
        "plain": {},
        "no accumulation": {"gradient_accumulation_steps": 1},
        "clipped": {"clip_grad_norm": 0.5},
        "shuffled": {"shuffle": True},
        "train_on_input": {"dataset": of_chats(train_on_input=True)},
        "cut": {"tokenizer": {**OF_TOKENIZER, "max_seq_len": 48}},
        "epochs": {"epochs": 2, "max_steps_per_epoch": None},
        "packing": {
            "dataset": of_chats(data_files="data/even_chat.jsonl", packed=True),
            "tokenizer": {**OF_TOKENIZER, "max_seq_len": 80},
        },
    },
    model="Qwen/Qwen2.5-0.5B-Instruct",
    place=QWEN2_5,
    prepare=as_torchtune_reads,
    write=lambda config: as_yaml({"max_steps_per_epoch": None, **config}),
    says={
        "packing": torchtune.SHORTER,
        "train_on_input": torchtune.WEIGHED,
        "cut": torchtune.CUT,
        "epochs": torchtune.WHOLE_STEPS,
    },
    environment={"SAME_RUN_PAD": "0", "SAME_RUN_ALPHA": "12"},
)

OF_CHATS: Config = {"path": "data/chat.jsonl", "ds_type": "json", "type": "chat_template"}
PACKED: Config = {
    **{"sample_packing": True, "sequence_len": 80, "pad_to_sequence_len": True},
    **{"micro_batch_size": 1, "gradient_accumulation_steps": 1},
}
AXOLOTL = Tool(
    "axolotl",
    ("axolotl", "train", "run.yaml", "--launcher", "python"),
    {
        "base_model": "./model",
        "adapter": "lora",
        **{"lora_r": 4, "lora_alpha": 12, "lora_dropout": 0.0, "lora_target_linear": True},
        # Kernels in Triton, which run only on GPUs.
        **{f"lora_{part}_kernel": False for part in ("mlp", "qkv", "o")},
        "datasets": [OF_CHATS],
        "sequence_len": 256,
        "sample_packing": False,
        "attn_implementation": "sdpa",
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "max_steps": STEPS,
        "num_epochs": 1,
        "lr_scheduler": "cosine",
        "optimizer": "adamw_torch",
        "weight_decay": 0.01,
        "logging_steps": 1,
        "save_strategy": "no",
        "output_dir": "out",
        "dataset_prepared_path": "prepared",
        **dict.fromkeys(("bf16", "fp16", "tf32"), False),
    },
    {
        "plain": {},
        "no accumulation": {"gradient_accumulation_steps": 1},
        "warm-up": {"warmup_ratio": 0.25},
        "epochs": {"max_steps": None, "num_epochs": 2, "warmup_steps": 2, "curriculum_sampling": True},
        "train_on_inputs": {"train_on_inputs": True},
        "dropped": {"sequence_len": 80, "curriculum_sampling": True},
        "cut": {"sequence_len": 48, "excess_length_strategy": "truncate"},
        "packing": {"datasets": [{**OF_CHATS, "path": "data/even_chat.jsonl"}], **PACKED},
        "dpo": {
            "rl": "dpo",
            "datasets": [{**OF_CHATS, "path": "data/answers.jsonl", "type": "chat_template.default"}],
        },
    },
    says={"dpo": axolotl_data.STRIPPED, "train_on_inputs": axolotl_data.MARKS},
    environment={"AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1"},
)


def unsloth_script(config: Config) -> str:
    """Return a script like Unsloth's notebooks: the config's rows, before and after, and SFTConfig's keys."""
    values = {key: value for key, value in config.items() if key not in ("rows", "before", "after")}
    return UNSLOTH_SCRIPT.format(given=values, **{key: config[key] for key in ("rows", "before", "after")})


UNSLOTH_SCRIPT = """\
import torch
from unsloth import FastLanguageModel
from unsloth.chat_templates import get_chat_template, train_on_responses_only
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

model, tokenizer = FastLanguageModel.from_pretrained(
    "./model", max_seq_length=256, load_in_4bit=False, dtype=torch.float32
)
model = FastLanguageModel.get_peft_model(
    model,
    r=4,
    lora_alpha=12,
    lora_dropout=0,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
)
rows = load_dataset("json", data_files="data/{rows}.jsonl", split="train")
{before}
trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=rows, args=SFTConfig(**{given}))
{after}
trainer.train()
"""
OF_TURNS = """

def texts(examples):
    turns = examples["messages"]
    return {"text": [tokenizer.apply_chat_template(one, tokenize=False) for one in turns]}


rows = rows.map(texts, batched=True)
"""
OF_ALPACA = '''
prompt = """Below is an instruction.

### Instruction:
{}

### Response:
{}"""
EOS_TOKEN = tokenizer.eos_token


def texts(examples):
    made = []
    for asked, answer in zip(examples["instruction"], examples["output"]):
        made.append(prompt.format(asked, answer) + EOS_TOKEN)
    return {"text": made}


rows = rows.map(texts, batched=True)
'''
RESPONSES = """
trainer = train_on_responses_only(
    trainer, instruction_part="<|im_start|>user\\n", response_part="<|im_start|>assistant\\n"
)
"""
IN_FULL: Config = {
    "dataset_text_field": "text",
    "optim": "adamw_torch",
    "warmup_steps": 0,
    **dict.fromkeys(("bf16", "fp16"), False),
}
"""Unsloth keeps TRL's defaults on a CPU but sets its own on a GPU, so both of these are set explicitly."""
IN_ORDER: Config = {"train_sampling_strategy": "sequential"}
UNSLOTH = Tool(
    "unsloth",
    ("python", "run.py"),
    {"rows": "chat", "before": OF_TURNS, "after": RESPONSES, **HF, **IN_FULL},
    {
        "plain": {},
        "no accumulation": {"gradient_accumulation_steps": 1},
        "warm-up": {"warmup_steps": 3},
        "whole text": {"after": ""},
        "chatml": {"before": 'tokenizer = get_chat_template(tokenizer, "chatml")\n' + OF_TURNS},
        "alpaca": {"rows": "plain", "before": OF_ALPACA, "after": ""},
        "epochs": {"max_steps": None, "num_train_epochs": 2, **IN_ORDER},
        "cut": {"max_length": 48},
    },
    files=("run.py",),
    write=unsloth_script,
    environment={"UNSLOTH_DISABLE_STATISTICS": "1", "UNSLOTH_COMPILE_DISABLE": "1"},
)

TOOLS: Mapping[str, Tool] = {
    tool.package: tool for tool in (LLAMAFACTORY, SWIFT, AXOLOTL, TORCHTUNE, LITGPT, UNSLOTH)
}
