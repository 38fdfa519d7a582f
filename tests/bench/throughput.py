"""Measure real tokens a second of a generated train.py, against Tunix's stock path on the same samples.

The stock path is the one of Tunix's own examples: Qwix's LoRA, and PeftTrainer with its default loss on one
padded sample a row. Both have the same model shape, rank, targets, rows of a micro-batch, accumulation,
optimizer and rematerialization, on one device. Both are compiled before the clock starts. The lengths are the
reference run's (mean 922, p99 2,553, at most 3,072 tokens), or a twelfth of them on a CPU. On a GPU,
train_trl.py of the same recipe trains on train.py's rows too.

python -m tests.bench.throughput FOLDER DEVICE    the stock side of a folder that `measure` made
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
MEAN, P99, CAP = 922, 2553, 3072
STEPS, WARM = 14, 2
"""Optimizer steps of each run, and the number of untimed ones."""
RANK = 8
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Case:
    """A run on one device.

    Attributes:
        scale: the reference run's lengths are divided by it.
        rows, accumulation: rows of a micro-batch, and micro-batches of an optimizer step.
        text: of the Gemma 4's config, what differs between devices.
    """

    dtype: str
    scale: int
    rows: int
    accumulation: int
    samples: int
    text: Mapping[str, Any] = field(repr=False)

    @property
    def cap(self) -> int:
        return CAP // self.scale

    @property
    def config(self) -> dict[str, Any]:
        return {
            "model_type": "gemma4_text",
            **self.text,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "sliding_window": 1024 // self.scale,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": self.text["vocab_size"],
            "num_kv_shared_layers": 0,
            "final_logit_softcapping": 30.0,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": 2,
        }

    @property
    def recipe(self) -> str:
        """Return the recipe, for one CPU device."""
        return f"""\
recipe: 1
name: throughput
model: {{id: ./model, dtype: {self.dtype}, attention: dot}}
mesh: {{accelerator: cpu-1, axes: {{fsdp: 1, tp: 1}}}}
lora: {{rank: {RANK}, alpha: {RANK}, dropout: 0.0}}
remat: {{policy: decoder}}
data: {{train: [train.jsonl], max_length: {self.cap}, packing: true}}
train:
  steps: {STEPS}
  global_batch_size: {self.rows * self.accumulation}
  micro_batch_size: {self.rows}
  optimizer: {{learning_rate: 1.0e-4, weight_decay: 0.0}}
  schedule: {{name: constant}}
  log: {{every: 1, tensorboard: false}}
checkpoint: {{directory: checkpoints, every_steps: 1000}}
cache: {{directory: null}}
"""


PERIOD = [*["sliding_attention"] * 5, "full_attention"]
CASES = {
    "cpu": Case(
        dtype="float32",
        scale=12,
        rows=4,
        accumulation=2,
        samples=1200,
        text={
            "vocab_size": 32_768,
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_hidden_layers": 6,
            "layer_types": PERIOD,
            "head_dim": 32,
            "global_head_dim": 64,
        },
    ),
    "gpu": Case(
        dtype="bfloat16",
        scale=1,
        rows=2,
        accumulation=4,
        samples=600,
        text={
            "vocab_size": 262_144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 24,
            "layer_types": PERIOD * 4,
            "head_dim": 128,
            "global_head_dim": 256,
        },
    ),
}
"""By the name that JAX gives the devices."""


def measure(folder: Path, device: str = "cpu") -> dict[str, float]:
    """Return real tokens a second: {"recipec": ..., "tunix": ...}, and on a GPU "trl"."""
    _write(folder, CASES[device])
    environment = {**os.environ, "JAX_PLATFORMS": "cuda" if device == "gpu" else device}
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # torch needs the memory too

    def python(*arguments: str | Path, cwd: Path = folder) -> str:
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(
            command, cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        return done.stdout

    backend = ["--backend", "trl"] if device == "gpu" else []
    python("-m", "recipec.compiler.cli.main", "build", "recipe.yaml", "-o", "generated", *backend)
    artifact = folder / "generated" / "throughput"
    script = artifact / "train.py"
    script.write_text(script.read_text().replace('platform="cpu"', f'platform="{device}"'))
    places = ("--data-dir", ".", "--model", "model")
    python(script, *places)
    found = {"recipec": _speed(artifact / "checkpoints")}
    found["tunix"] = float(python("-m", "tests.bench.throughput", folder, device, cwd=ROOT).splitlines()[-1])
    if device == "gpu":
        python(artifact / "baseline" / "train_trl.py", *places)
        found["trl"] = _speed(next(artifact.rglob("checkpoints-trl")))
    return found


def _speed(checkpoints: Path) -> float:
    lines = (checkpoints / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if "step_seconds" in row][WARM:]
    return sum(row["tokens"] for row in steps) / sum(row["step_seconds"] for row in steps)


def lengths(case: Case) -> np.ndarray:
    """Draw the samples' lengths: log-normal with the reference's mean and 99th percentile, cut at its cap."""
    spread = _spread(P99 / MEAN)
    random = np.random.default_rng(0)
    drawn = random.lognormal(np.log(MEAN / case.scale) - spread**2 / 2, spread, case.samples)
    return np.clip(drawn, 24, case.cap - 1).astype(int)


def _spread(ratio: float) -> float:
    """Return the spread of a log-normal distribution whose 99th percentile is `ratio` times its mean."""
    quantile = 2.3263
    return quantile - (quantile**2 - 2 * np.log(ratio)) ** 0.5


def _write(folder: Path, case: Case) -> None:
    """Write the checkpoint, the samples as chats, and the recipe."""
    from transformers import AutoTokenizer

    from recipec.compiler.miniature.small_checkpoint import complete, write_checkpoint

    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(folder / "model", complete(case.config), dtype=case.dtype, shards=1)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    words = ("river", "baker", "bridge", "lantern", "market", "stone", "valley", "train", "garden", "roof")
    random = np.random.default_rng(1)
    rows = []
    for wanted in lengths(case):
        text = " ".join(random.choice(words, wanted))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][: max(8, wanted - 16)]
        cut = len(ids) // 3
        question, answer = tokenizer.decode(ids[:cut]), tokenizer.decode(ids[cut:])
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append(json.dumps({"messages": messages}) + "\n")
    (folder / "train.jsonl").write_text("".join(rows))
    (folder / "recipe.yaml").write_text(case.recipe)


def stock(folder: Path, case: Case) -> float:
    """Return the real tokens a second of Tunix's path on the folder's samples."""
    import jax
    import jax.numpy as jnp
    import optax
    import qwix
    from flax import nnx
    from tunix.models.gemma4 import model as gemma4
    from tunix.sft import peft_trainer, utils

    from recipec.runtime.data.prepare import prepare
    from recipec.runtime.data.tokenizer import load_tokenizer
    from recipec.runtime.model.families import family_of
    from recipec.runtime.model.families.decoder_family import described
    from recipec.runtime.settings import DataSettings, ModelSettings, TrainSettings
    from tests.tunix_models import gemma4_config

    data = DataSettings(train=("train.jsonl",), max_length=case.cap, packing=False)
    rows = case.rows * case.accumulation
    train = TrainSettings(steps=STEPS, global_batch_size=rows, micro_batch_size=case.rows)
    settings = ModelSettings(id=str(folder / "model"), family="gemma4", dtype=case.dtype)
    tokenizer = load_tokenizer(folder / "model", settings, data, folder)
    prepared = prepare(data, train, case.rows, tokenizer, folder, case.config["vocab_size"])

    dtype = jnp.dtype(case.dtype)
    config = gemma4_config(described(family_of(case.config).architecture(case.config)), dtype)
    model = gemma4.Gemma4(config, rngs=nnx.Rngs(0))
    nnx.update(model, jax.tree.map(lambda array: array.astype(dtype), nnx.state(model, nnx.Param)))
    provider = qwix.LoraProvider(
        module_path=".*(q_einsum|k_einsum|kv_einsum|attn_vec_einsum|gate_proj|up_proj|down_proj)",
        rank=RANK,
        alpha=RANK,
    )
    model = qwix.apply_lora_to_model(model, provider, **model.get_model_input())
    model.config.remat_config = gemma4.RematConfig.DECODER
    trainer = peft_trainer.PeftTrainer(
        model,
        optax.adamw(1e-4, weight_decay=0.0),
        peft_trainer.TrainingConfig(eval_every_n_steps=10**6, gradient_accumulation_steps=case.accumulation),
    )

    def inputs(batch: Any) -> dict[str, Any]:
        return {
            "input_tokens": batch.input_tokens,
            "input_mask": batch.input_mask,
            "positions": utils.build_positions_from_mask(batch.input_tokens != 0),
            "attention_mask": utils.make_causal_attn_mask(batch.input_tokens != 0),
        }

    trainer = trainer.with_gen_model_input_fn(inputs)
    started, tokens = [0.0], [0]

    def batches() -> Any:
        for index in range(STEPS * case.accumulation):
            if index == WARM * case.accumulation:
                jax.block_until_ready(nnx.state(model, nnx.LoRAParam))
                started[0] = time.perf_counter()
            one = prepared.micro_batch(index)
            if index >= WARM * case.accumulation:
                tokens[0] += int((one["segment_ids"] > 0).sum())
            yield peft_trainer.TrainingInput(input_tokens=one["tokens"], input_mask=one["loss_mask"])

    with jax.default_matmul_precision("highest" if case.dtype == "float32" else "default"):
        trainer.train(batches(), skip_jit=False)
    jax.block_until_ready(nnx.state(model, nnx.LoRAParam))
    return tokens[0] / (time.perf_counter() - started[0])


if __name__ == "__main__":
    print(stock(Path(sys.argv[1]), CASES[sys.argv[2]]))
