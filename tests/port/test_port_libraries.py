"""Compare ports of TRL's, the Trainer's, torchtune's and litgpt's files with those libraries.

torchtune and litgpt are read from their wheels, which `make e2e` downloads: single functions and classes that
need only torch. What imports TRL is in `make nightly`.
"""

from __future__ import annotations

import ast
import math
import sys
import types
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
import torch
import yaml
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainingArguments, get_scheduler, trainer_optimizer
from transformers.training_args import OptimizerNames
from transformers.utils.chat_template_utils import render_jinja_template

from recipec.compiler.catalog import entries, find
from recipec.compiler.lowering.optimization import schedule
from recipec.compiler.python_text import source
from recipec.port.dialects.trl import SHIPPED
from recipec.port.engine import collect
from recipec.port.ledger import Ledger
from recipec.port.meaning import adapters, sharding, templates, training
from recipec.port.scripts.dialects import TUNIX
from recipec.port.source import Sources
from recipec.spec.language.train import Train
from tests.port import wheels
from tests.port.dialects import base, beside, ported
from tests.port.dialects import source as file

RATE = 3e-4


def from_wheel(name: str, path: str, *wanted: str, **given: Any) -> dict[str, Any]:
    """Return some definitions of a wheel's file, run without the rest of it."""
    (wheel,) = wheels.fetch().glob(f"{name}-*.whl")
    tree = ast.parse(zipfile.ZipFile(wheel).read(path).decode())
    body = [node for node in tree.body if getattr(node, "name", None) in wanted]
    assert len(body) == len(wanted)
    module = types.ModuleType(f"{name}_of_a_wheel")
    sys.modules[module.__name__] = module  # where dataclasses looks for the types of fields
    space = vars(module)
    space.update(given)
    exec(compile(ast.Module(body, []), path, "exec", dont_inherit=True, flags=0x1000000), space)
    return space


def rates(ledger: Ledger, steps: int) -> list[float]:
    """Return the recipe's rates, by the expression in its train.py."""
    values = {
        key: ledger.value(f"train.schedule.{key}")
        for key in ("name", "min_lr_ratio", "warmup_steps", "warmup_ratio")
    }
    given = {key: value for key, value in values.items() if value is not None}
    train = Train.model_validate({"schedule": given})
    text = source(schedule(train))
    rate = eval(
        text,
        {
            "optax": optax,
            "LEARNING_RATE": RATE,
            "MIN_LR_RATIO": train.schedule.min_lr_ratio,
            "WARMUP_STEPS": train.schedule.warmup_steps,
            "warmup": math.ceil((train.schedule.warmup_ratio or 0) * steps),
            "steps": steps,
        },
    )
    return [float(rate(step)) for step in range(steps)]


def stepped(make: Callable[[Any], Any], steps: int) -> list[float]:
    """Return the rates of a scheduler of torch, step by step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler = make(optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


TRL: dict[str, Any] = {"model_name_or_path": "Qwen/Qwen3-0.6B", "dataset_name": "a/b", "use_peft": True}


@pytest.mark.nightly
@pytest.mark.parametrize("objective", ["sft", "dpo"])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {
            "learning_rate": 1e-4,
            "num_train_epochs": 2,
            "per_device_train_batch_size": 3,
            "gradient_accumulation_steps": 5,
            "weight_decay": 0.1,
            "adam_beta2": 0.95,
            "max_grad_norm": 0.3,
            "max_length": 700,
            "lora_r": 4,
            "lora_alpha": 12,
            "lora_target_modules": ["q_proj", "o_proj"],
            "gradient_checkpointing": False,
            "seed": 9,
        },
        {"max_steps": 30, "fp16": True, "bf16": False, "lora_target_modules": ["all-linear"]},
    ],
)
def test_ported_values_match_trl_parser(tmp_path: Path, objective: str, keys: dict[str, Any]) -> None:
    from trl import get_peft_config
    from trl.scripts import dpo, sft

    content = {**TRL, **keys, "output_dir": str(tmp_path / "out"), "use_cpu": True}
    ledger = ported("trl", tmp_path, content, name=f"{objective}.yaml", script=objective)
    parser = {"sft": sft, "dpo": dpo}[objective].make_parser()
    script, training, model, _ = parser.parse_args_and_config(
        ["--config", str(tmp_path / f"{objective}.yaml")]
    )
    peft = get_peft_config(model)
    expected = {
        "train.optimizer.learning_rate": training.learning_rate,
        "train.optimizer.weight_decay": training.weight_decay,
        "train.optimizer.b1": training.adam_beta1,
        "train.optimizer.b2": training.adam_beta2,
        "train.optimizer.eps": training.adam_epsilon,
        "train.optimizer.max_grad_norm": training.max_grad_norm,
        "train.micro_batch_size": training.per_device_train_batch_size,
        "train.global_batch_size": training.train_batch_size * training.gradient_accumulation_steps,
        "train.epochs": None if training.max_steps > 0 else training.num_train_epochs,
        "train.steps": training.max_steps if training.max_steps > 0 else None,
        "train.schedule.name": training.lr_scheduler_type.value,
        "train.seed": training.seed,
        "data.max_length": training.max_length,
        "data.packing": getattr(training, "packing", None),
        # The tool's default is for GPUs: without the key, the compiler chooses.
        "remat.policy": "none" if keys.get("gradient_checkpointing") is False else None,
        "lora.rank": peft.r,
        "lora.alpha": peft.lora_alpha,
        "lora.dropout": 0.0 if objective == "dpo" and training.disable_dropout else peft.lora_dropout,
    }
    assert {path: ledger.value(path) for path in expected} == expected
    assert ledger.value("data.train") == [f"hf://{script.dataset_name}"]
    assert training.bf16 is (not keys.get("fp16", False))
    if peft.target_modules is not None and peft.target_modules != "all-linear":
        assert set(ledger.value("lora.targets")) == set(peft.target_modules)


@pytest.mark.parametrize(
    "keys",
    [
        {"lr_scheduler_type": "linear", "warmup_steps": 7},
        {"lr_scheduler_type": "cosine", "warmup_ratio": 0.13},
        {"lr_scheduler_type": "cosine", "warmup_steps": 0.1},
        {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 7},
        {
            "lr_scheduler_type": "cosine_with_min_lr",
            "warmup_steps": 4,
            "lr_scheduler_kwargs": {"min_lr": 3e-5},
        },
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1e-5}},
    ],
)
def test_learning_rates_match_transformers(tmp_path: Path, keys: dict[str, Any]) -> None:
    steps = 40
    ledger = ported("trl", tmp_path, {**TRL, **keys, "learning_rate": RATE}, script="sft")
    arguments = TrainingArguments(output_dir=str(tmp_path / "out"), learning_rate=RATE, use_cpu=True, **keys)
    made = stepped(
        lambda optimizer: get_scheduler(
            arguments.lr_scheduler_type,
            optimizer,
            arguments.get_warmup_steps(steps),
            steps,
            arguments.lr_scheduler_kwargs or {},
        ),
        steps,
    )
    # optax computes in float32.
    np.testing.assert_allclose(rates(ledger, steps), made, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("model", [name for name in entries() if "config" in entries()[name]])
def test_default_lora_targets_match_peft(model: str) -> None:
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as mapping

    wanted = mapping.get(entries()[model]["config"]["model_type"])
    assert adapters.default_targets(find(model, Path())) == wanted


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adafactor"])
def test_optimizer_defaults_match_torch(name: str) -> None:
    defaults = getattr(torch.optim, name)([torch.nn.Parameter(torch.zeros(2, 2))]).defaults
    ours = training.TORCH_DEFAULTS[name.lower()]
    theirs = {key: list(value) if isinstance(value, tuple) else value for key, value in defaults.items()}
    assert {key: theirs[key] for key in ours} == ours


@pytest.mark.nightly
@pytest.mark.parametrize("key", ["fsdp2", "multi_gpu", "single_gpu", "zero2", "zero3"])
def test_process_count_and_launch_settings_match_accelerate(tmp_path: Path, key: str) -> None:
    import trl
    from accelerate.commands.config.config_args import load_config_from_file

    shipped = Path(trl.__file__).parent / "accelerate_configs" / f"{key}.yaml"
    theirs = load_config_from_file(str(shipped))
    found = file(tmp_path, "accelerate.yaml", shipped.read_text(encoding="utf-8"))
    ledger = Ledger(Sources(found))
    launch = collect(sharding.accelerate(ledger, found))
    # Without a distributed type accelerate starts one process, whatever their number.
    processes = 1 if theirs.distributed_type.value == "NO" else theirs.num_processes
    assert (launch.processes, launch.mixed_precision) == (processes, theirs.mixed_precision)
    assert SHIPPED[key] == processes
    assert launch.deepspeed is (theirs.distributed_type.value == "DEEPSPEED")
    assert ledger.unread(found) == []
    assert yaml.safe_load(shipped.read_text(encoding="utf-8")).keys() <= {
        each.key.split(".")[0] for each in ledger.findings
    }


TORCHTUNE: dict[str, Any] = {
    "model": {"_component_": "torchtune.models.llama3_2.lora_llama3_2_1b", "lora_attn_modules": ["q_proj"]},
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "max_seq_len": 64},
    "dataset": {"_component_": "torchtune.datasets.alpaca_dataset"},
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": RATE},
    "lr_scheduler": {
        "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
        "num_warmup_steps": 6,
    },
    "batch_size": 1,
    "epochs": 1,
}


@pytest.mark.e2e
def test_learning_rates_match_torchtune(tmp_path: Path) -> None:
    name = "get_cosine_schedule_with_warmup"
    made = from_wheel(
        "torchtune", "torchtune/training/lr_schedulers.py", name, torch=torch, math=math, LambdaLR=LambdaLR
    )
    ledger = ported("torchtune", tmp_path, TORCHTUNE)
    theirs = stepped(lambda optimizer: made[name](optimizer, 6, 40), 40)
    np.testing.assert_allclose(rates(ledger, 40), theirs, rtol=1e-5, atol=1e-9)


@pytest.mark.e2e
def test_learning_rates_match_litgpt(tmp_path: Path) -> None:
    made = from_wheel("litgpt", "litgpt/finetune/lora.py", "get_lr_scheduler", torch=torch)
    content = {"checkpoint_dir": "Qwen/Qwen3-0.6B", "lora_r": 4, "train": {"lr_warmup_steps": 6}}
    ledger = ported("litgpt", tmp_path, content)
    theirs = stepped(lambda optimizer: made["get_lr_scheduler"](optimizer, 6, 40), 40)
    np.testing.assert_allclose(rates(ledger, 40), theirs, rtol=1e-5, atol=1e-9)


COSINE = {"opt_type": "adamw", "schedule_type": "warmup_cosine_decay_schedule", "init_value": 0.0}
COSINE |= {"peak_value": RATE, "end_value": RATE / 10, "warmup_steps": 3, "decay_steps": 10}
LION = {"opt_type": "lion", "schedule_type": "cosine_decay_schedule", "init_value": RATE, "decay_steps": 10}


@pytest.mark.parametrize("section", [{}, COSINE | {"b2": 0.95, "max_grad_norm": 1.0}, LION | {"alpha": 0.1}])
def test_learning_rates_and_optimizer_match_tunix(
    tmp_path: Path, section: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tunix.cli.config import HyperParameters

    monkeypatch.setenv("HF_TOKEN", "of no one")
    base = {
        **TUNIX["config"],
        "model_config": {**TUNIX["model"], "mesh": TUNIX["mesh"], "lora_config": {}},
        **{f"{name}_config": TUNIX[name] for name in ("tokenizer", "optimizer", "training")},
    }
    given = file(tmp_path, "base_config.yaml", base)
    words = [f"optimizer_config.{key}={value}" for key, value in section.items()]
    rule = HyperParameters(["peft_main", str(given.path), *words]).create_optimizer("optimizer_config")
    state, theirs = rule.init({"a": np.ones(3)}), []
    for _ in range(10):
        _, state = rule.update({"a": np.ones(3)}, state, {"a": np.ones(3)})
        theirs.append(float(state.hyperparams["learning_rate"]))
    ledger = ported(
        "tunix", tmp_path, {"batch_size": 16, **({"optimizer_config": section} if section else {})}
    )
    peak = ledger.value("train.optimizer.learning_rate")
    np.testing.assert_allclose(np.array(rates(ledger, 10)) * peak / RATE, theirs, rtol=1e-5, atol=1e-9)
    for key in {"b1", "b2", "eps", "weight_decay"} & set(state.hyperparams):
        assert ledger.value(f"train.optimizer.{key}") == pytest.approx(float(state.hyperparams[key]))
    assert ledger.value("train.optimizer.max_grad_norm") is None


@pytest.mark.e2e
@pytest.mark.parametrize("given", ["", "1 2"])
def test_alpaca_prompt_matches_torchtune(tmp_path: Path, given: str) -> None:
    made = from_wheel(
        "torchtune",
        "torchtune/data/_messages.py",
        "AlpacaToMessages",
        Transform=object,
        Message=types.SimpleNamespace,
    )
    row = {"instruction": "Add {these}.", "input": given, "output": "3"}
    theirs = made["AlpacaToMessages"]()(row)["messages"]
    ours: dict[str, Any] = {}
    exec(ported("torchtune", tmp_path, TORCHTUNE).files["convert.py"], ours)
    assert ours["convert"](row) == {"messages": [{"role": m.role, "content": m.content} for m in theirs]}


TURNS = (
    ("system", "Be brief."),
    ("user", "Hi"),
    ("assistant", "Yes."),
    ("user", "So?"),
    ("assistant", "No."),
)


def tokenized(name: str, turns: Any) -> str:
    """Return what torchtune's code makes of a conversation, with texts in place of tokens."""
    messages = [
        types.SimpleNamespace(
            role=role, content=[{"type": "text", "content": text}], masked=False, ipython=False, eot=True
        )
        for role, text in turns
    ]
    bases = ("ModelTokenizer", "Transform", "PromptTemplateInterface")
    given: dict[str, Any] = {base: type(base, (), {}) for base in bases}
    given["Message"] = types.SimpleNamespace
    package = name.partition("_")[0]
    if package.startswith("phi"):
        made = "Phi3MiniTokenizer" if package == "phi3" else "Phi4Tokenizer"
        tokenizer = from_wheel("torchtune", f"torchtune/models/{package}/_tokenizer.py", made, **given)[made]
        tokenizer.vocab_size = tokenizer.bos_id = None  # which are properties of a file that there is not
        own = tokenizer.__new__(tokenizer)
        own.encode = lambda text, **_: [text]
        own.special_tokens = {
            f"<|{m}|>": f"<|{m}|>"
            for m in ("user", "assistant", "system", "end", "im_start", "im_sep", "im_end")
        }
        own.bos_id, own.max_seq_len, own.prompt_template = "<s>", None, None
        return "".join(own.tokenize_messages(messages)[0])
    if package in ("llama2", "mistral"):
        made = f"{package.capitalize()}ChatTemplate"
        path = f"torchtune/models/{package}/_prompt_template.py"
        messages = from_wheel("torchtune", path, made, **given)[made]()(messages)
    join = "tokenize_messages_no_special_tokens"
    path = "torchtune/modules/transforms/tokenizers/_utils.py"

    def encode(text: str, trim_leading_whitespace: bool = False, **_: Any) -> list[str]:
        """Put a blank before a text, as SentencePiece does, except Gemma's."""
        return [("" if trim_leading_whitespace or package == "gemma" else " ") + text] if text else []

    own = types.SimpleNamespace(encode=encode, max_seq_len=None)
    parts = from_wheel("torchtune", path, join, **given)[join](own, messages, bos_id="<s>", eos_id="</s>")[0]
    return "".join(parts).replace("<s> ", "<s>")


@pytest.mark.e2e
@pytest.mark.parametrize(
    "name",
    ["gemma_tokenizer", "llama2_tokenizer", "mistral_tokenizer", "phi3_mini_tokenizer", "phi4_tokenizer"],
)
def test_chat_templates_match_torchtune_tokenizers(name: str) -> None:
    # Mistral's takes no system message, and Llama 2's writes it before each question: the port says so.
    turns = {"mistral_tokenizer": TURNS[1:], "llama2_tokenizer": TURNS[:3]}.get(name, TURNS)
    messages = [{"role": role, "content": text} for role, text in turns]
    template = templates.written(templates.TORCHTUNE[name])
    made, _ = render_jinja_template([messages], chat_template=template, bos_token="<s>", eos_token="</s>")
    assert made[0] == tokenized(name, turns)


BNB = ("AdamW", "Lion", "RMSprop", "AdEMAMix")


@pytest.mark.nightly
@pytest.mark.parametrize("tool", ["axolotl", "trl", "llamafactory"])
def test_optimizer_arguments_are_those_that_transformers_gives_each_name(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = types.ModuleType("bitsandbytes.optim")
    for name in BNB:
        setattr(stand_in, name, type(name, (), {}))
    package = types.ModuleType("bitsandbytes")
    monkeypatch.setattr(package, "optim", stand_in, raising=False)
    for name, module in (("bitsandbytes", package), ("bitsandbytes.optim", stand_in)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(trainer_optimizer, "is_bitsandbytes_available", lambda: True)
    key = "optimizer" if tool == "axolotl" else "optim"
    tried = 0
    for optimizer in OptimizerNames:
        kind = training.optimizer_of(optimizer.value)
        if not kind.same or kind.name not in ("adamw", "lion"):
            continue
        for given in ({}, {"adam_beta2": 0.95, "adam_epsilon": 1e-6}):
            content = {**base(tool), key: optimizer.value, **given}
            ledger = ported(tool, tmp_path, content, script="sft" if tool == "trl" else None, **beside(tool))
            arguments = TrainingArguments(tmp_path, optim=optimizer.value, use_cpu=True, **given)
            with suppress(ValueError, ImportError, RuntimeError):  # a package or a device is missing
                _, wanted = Trainer.get_optimizer_cls_and_kwargs(arguments)
                tried += 1
                made = [ledger.value(f"train.optimizer.{name}") for name in ("b1", "b2")]
                assert made == [*wanted["betas"]], optimizer
                if kind.name == "adamw":
                    assert ledger.value("train.optimizer.eps") == wanted["eps"], optimizer
    assert tried > 10


def arguments_of(name: str, path: str, wanted: str) -> dict[str, Any]:
    """Return the default arguments of a class in a file of a wheel."""
    (wheel,) = wheels.fetch(wheels.OPTIMIZERS).glob(f"{name}-*.whl")
    tree = ast.parse(zipfile.ZipFile(wheel).read(path).decode())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == wanted)
    made = next(node for node in found.body if getattr(node, "name", "") == "__init__")
    assert isinstance(made, ast.FunctionDef)
    names = [*made.args.args, *made.args.kwonlyargs]
    values = [*made.args.defaults, *made.args.kw_defaults]
    pairs = zip([each.arg for each in names[len(names) - len(values) :]], values, strict=True)
    return {key: ast.literal_eval(value) for key, value in pairs if value is not None}


@pytest.mark.e2e
def test_defaults_of_axolotls_own_optimizers_are_those_of_their_classes() -> None:
    places = {
        "optimi_adamw": ("torch_optimi", "optimi/adamw.py", "AdamW"),
        "ao_adamw_fp8": ("torchao", "torchao/optim/adam.py", "AdamWFp8"),
        "flash_adamw": ("flashoptim", "flashoptim/optimizers.py", "FlashAdamW"),
        "flash_adam": ("flashoptim", "flashoptim/optimizers.py", "FlashAdam"),
        "flash_lion": ("flashoptim", "flashoptim/optimizers.py", "FlashLion"),
        "flash_sgdw": ("flashoptim", "flashoptim/optimizers.py", "FlashSGDW"),
    }
    assert places.keys() == training.BY_AXOLOTL.keys()
    for name, place in places.items():
        recorded = training.TORCH_DEFAULTS[training.BY_AXOLOTL[name]]
        found = arguments_of(*place)
        for key in {"betas", "eps", "momentum"}.intersection(recorded):
            assert [found[key]] == [recorded[key]] or [*found[key]] == recorded[key], (name, key)
