"""Recipes for the tests of this folder, and tools that check emitted files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from recipec.compiler.emitters.emit import emit
from recipec.compiler.lower import lower
from recipec.compiler.lowering.program import Program
from recipec.spec.diagnostics import render_text
from recipec.spec.load import load

BIN = Path(sys.executable).parent

RECIPE = """\
recipe: 1
name: sample
model: {id: google/gemma-4-31B-it}
mesh: {accelerator: v5p-8, axes: {fsdp: 4, tp: 1}}   # a comment that stays
lora: {rank: 16}
data: {train: [{path: data/train.jsonl}]}
serve: {accelerator: v6e-8}
"""

EVERYTHING = {
    "plain": ["serve=null"],
    "rules": [
        "train.schedule={name: linear, warmup_steps: 3}",
        "train.steps=9",
        "sharding.rules=[{match: '.*mlp.down_proj.*', spec: [tp, fsdp]}, {match: 'final.*', spec: [null]}]",
        "mesh.axes={fsdp: 2, tp: 2}",
        "lora.layers=20-59",
        "model.revision=main",
    ],
    "lists": [
        "train.schedule={name: cosine, warmup_ratio: 0.1}",
        "lora.layers=[0, 5, 11]",
        "lora.targets=['layers.[0-9]+.self_attn.q_proj', 'o_proj']",
        "data.train=[a.jsonl, gs://bucket/b.jsonl, a-rather-long-folder-name/a-rather-long-file-name.jsonl]",
        "data.eval=[eval.jsonl]",
        "data.fields={messages: conversation}",
        "checkpoint.directory=gs://a-bucket-with-a-long-name/some-rather-long-folder-name/another-folder/run-1",
    ],
    "constant": ["train.schedule={name: constant}", "train.steps=10", "train.optimizer.max_grad_norm=1.0"],
    "template": [
        "train.schedule={name: constant, warmup_steps: 7}",
        "data.shuffle_seed=null",
        'data.chat_template="{% for m in messages %}<|turn>{{ m.role }} {{ m.content }}<turn|>{% endfor %}"',
    ],
    "template-file": [
        "train.schedule={name: linear, min_lr_ratio: 0.1}",
        "data.chat_template=templates/a-folder-of-templates/a-template-with-a-long-name.jinja",
    ],
    "served": [
        "train.schedule={name: linear, warmup_ratio: 0.03}",
        "serve.extra_args={max_log_len: 10, disable_log_stats: true, async_scheduling: false, "
        'ignore_patterns: [a b, c], limit_mm_per_prompt: {image: 0}, chat_template: "it\'s \\"$HOME\\""}',
        'serve.env={GREETING: \'say "hi" for $5 \\ now\', EMPTY: ""}',
        "serve.tool_call_parser=gemma4",
        "serve.tensor_parallel_size=4",
        "serve.data_parallel_size=2",
        "serve.quantization=fp8",
        "serve.prefix_caching=false",
        "serve.port=9000",
        "merge.output='merged weights'",
    ],
    "adapter": [
        "serve.weights=adapter",
        "serve.env={MODEL_IMPL_TYPE: vllm}",
        "serve.model=./base",
        "serve.autoscaling={max_replicas: 3}",
    ],
    "bucket": [
        "serve.model=gs://bucket/merged",
        "serve.host=0.0.0.0",
        "serve.autoscaling={min_replicas: 2, max_replicas: 4}",
    ],
    "adapter-in-a-bucket": [
        "model.revision=main",
        "serve.weights=adapter",
        "serve.env={MODEL_IMPL_TYPE: vllm}",
        "merge.output=gs://bucket/merged",
        "serve.host='::'",
    ],
    "hub": ["serve.model=somebody/merged", "serve.decode_block_sizes=[1, 1024, 1, 1024]"],
    "elsewhere": [
        "serve.model=~/models/merged",
        'serve.smoke_prompts=["What\'s $HOME?"]',
        "serve.accelerator=v5e-8",
        "serve.kv_cache_dtype=auto",
    ],
    "copied-by-hand": ["merge.output=s3://bucket/merged", "evaluate.tasks=[gsm8k]"],
    "cpu": [
        "train.schedule={name: cosine}",
        "train.optimizer.learning_rate=2.5e-5",
        "mesh={accelerator: cpu-8, axes: {fsdp: 4, tp: 2}}",
        "name=on",
        "model.dtype=float32",
    ],
    "tpu7x": [
        "mesh={topology: 'tpu7x:1x1x1', axes: {fsdp: 2, tp: 1}}",
        "serve.accelerator=tpu7x-2",
        "serve.tensor_parallel_size=2",
    ],
}
"""--set arguments by recipe, which together use every branch of the emitters."""


def program_of(folder: Path, sets: Sequence[str] = (), text: str = RECIPE) -> Program:
    """Write a recipe into `folder` as recipe.yaml, and return its program."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    return compiled(folder / "recipe.yaml", sets)


def compiled(path: Path, sets: Sequence[str] = ()) -> Program:
    """Return the program of a recipe's file."""
    lowered = lower(load(path, sets))
    assert lowered.program is not None, render_text(lowered.diagnostics)
    return lowered.program


def files_of(folder: Path, sets: Sequence[str] = (), text: str = RECIPE) -> dict[str, bytes]:
    """Write a recipe into `folder`, and return its artifact."""
    return emit(program_of(folder, sets, text))


def tool(name: str, *arguments: object, cwd: Path | None = None) -> str:
    """Run a command of the development environment, and return its output if it fails, or ""."""
    command = [str(BIN / name), *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    return "" if done.returncode == 0 else f"{name}: {done.stdout}{done.stderr}"
