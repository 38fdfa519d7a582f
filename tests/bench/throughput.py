"""Measure real tokens a second of a generated train.py, against Tunix's stock path on the same samples.

The stock path is the one of Tunix's own examples: Qwix's LoRA, and PeftTrainer with its default loss on one
padded sample a row. Both have the same model shape, rank, targets, rows of a micro-batch, accumulation,
optimizer and rematerialization, in float32 on one CPU device. Both are compiled before the clock starts. The
lengths are a twelfth of the reference run's (mean 922, p99 2,553, at most 3,072 tokens).

python -m tests.bench.throughput FOLDER    the stock side of a folder that `measure` made
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
SCALE = 12
MEAN, P99, CAP = 922 / SCALE, 2553 / SCALE, 3072 // SCALE
SAMPLES, ROWS, ACCUMULATION = 1200, 4, 2
STEPS, WARM = 14, 2
"""Optimizer steps of each run, and the number of untimed ones."""
RANK = 8
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TEXT = {
    "model_type": "gemma4_text",
    "vocab_size": 32_768,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"],
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "global_head_dim": 64,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "sliding_window": 1024 // SCALE,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 32_768,
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
RECIPE = f"""\
recipe: 1
name: throughput
model: {{id: ./model, dtype: float32}}
mesh: {{accelerator: cpu-1, axes: {{fsdp: 1, tp: 1}}}}
lora: {{rank: {RANK}, alpha: {RANK}, dropout: 0.0}}
remat: {{policy: decoder}}
data: {{train: [train.jsonl], max_length: {CAP}, packing: true}}
train:
  steps: {STEPS}
  global_batch_size: {ROWS * ACCUMULATION}
  micro_batch_size: {ROWS}
  optimizer: {{learning_rate: 1.0e-4, weight_decay: 0.0}}
  schedule: {{name: constant}}
  log: {{every: 1, tensorboard: false}}
checkpoint: {{directory: checkpoints, every_steps: 1000}}
cache: {{directory: null}}
"""


def measure(folder: Path) -> dict[str, float]:
    """Return real tokens a second: {"recipec": ..., "tunix": ...}."""
    _write(folder)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    recipe = Path(sys.executable).with_name("recipe")
    commands = (
        [recipe, "build", "recipe.yaml", "-o", "generated"],
        [sys.executable, "generated/throughput/train.py", "--data-dir", ".", "--model", "model"],
    )
    for command in commands:
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    lines = (folder / "generated/throughput/checkpoints/metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines[WARM:]]
    ours = sum(line["tokens"] for line in steps) / sum(line["step_seconds"] for line in steps)
    stock = subprocess.run(
        [sys.executable, "-m", "tests.bench.throughput", str(folder)],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return {"recipec": ours, "tunix": float(stock.stdout.splitlines()[-1])}


def lengths(count: int) -> np.ndarray:
    """Draw the samples' lengths: log-normal with the reference's mean and 99th percentile, cut at its cap."""
    spread = _spread(P99 / MEAN)
    random = np.random.default_rng(0)
    drawn = random.lognormal(np.log(MEAN) - spread**2 / 2, spread, count)
    return np.clip(drawn, 24, CAP - 1).astype(int)


def _spread(ratio: float) -> float:
    """Return the spread of a log-normal distribution whose 99th percentile is `ratio` times its mean."""
    quantile = 2.3263
    return quantile - (quantile**2 - 2 * np.log(ratio)) ** 0.5


def _write(folder: Path) -> None:
    """Write the checkpoint, the samples as chats, and the recipe."""
    from transformers import AutoTokenizer

    from recipec.compiler.rehearse.miniature import complete, write_checkpoint

    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(folder / "model", complete(TEXT), dtype="float32", shards=1)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    words = ("river", "baker", "bridge", "lantern", "market", "stone", "valley", "train", "garden", "roof")
    random = np.random.default_rng(1)
    rows = []
    for wanted in lengths(SAMPLES):
        text = " ".join(random.choice(words, wanted))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][: max(8, wanted - 16)]
        cut = len(ids) // 3
        question, answer = tokenizer.decode(ids[:cut]), tokenizer.decode(ids[cut:])
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append(json.dumps({"messages": messages}) + "\n")
    (folder / "train.jsonl").write_text("".join(rows))
    (folder / "recipe.yaml").write_text(RECIPE)


def stock(folder: Path) -> float:
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
    from recipec.runtime.settings import DataSettings, ModelSettings, TrainSettings

    data = DataSettings(train=("train.jsonl",), max_length=CAP, packing=False)
    train = TrainSettings(steps=STEPS, global_batch_size=ROWS * ACCUMULATION, micro_batch_size=ROWS)
    settings = ModelSettings(id=str(folder / "model"), family="gemma4", dtype="float32")
    tokenizer = load_tokenizer(folder / "model", settings, data, folder)
    prepared = prepare(data, train, ROWS, tokenizer, folder, TEXT["vocab_size"])

    family = family_of(TEXT)
    _, config = family.tunix_model(family.architecture(TEXT), dtype=jnp.float32)
    model = gemma4.Gemma4(config, rngs=nnx.Rngs(0))
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
        peft_trainer.TrainingConfig(eval_every_n_steps=10**6, gradient_accumulation_steps=ACCUMULATION),
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
        for index in range(STEPS * ACCUMULATION):
            if index == WARM * ACCUMULATION:
                jax.block_until_ready(nnx.state(model, nnx.LoRAParam))
                started[0] = time.perf_counter()
            one = prepared.micro_batch(index)
            if index >= WARM * ACCUMULATION:
                tokens[0] += int((one["segment_ids"] > 0).sum())
            yield peft_trainer.TrainingInput(input_tokens=one["tokens"], input_mask=one["loss_mask"])

    with jax.default_matmul_precision("highest"):
        trainer.train(batches(), skip_jit=False)
    jax.block_until_ready(nnx.state(model, nnx.LoRAParam))
    return tokens[0] / (time.perf_counter() - started[0])


if __name__ == "__main__":
    print(stock(Path(sys.argv[1])))
