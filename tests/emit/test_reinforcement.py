"""Tests of what a recipe of reinforcement learning adds to its artifact."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from emitting import files_of, tool

from recipec.compiler.vllm.flags import flags
from recipec.runtime.reinforcement.loss_types import KL_ESTIMATORS, LOSS_TYPES, RATIOS
from recipec.runtime.reinforcement.ready_rewards import READY_REWARDS
from recipec.runtime.sections import RewardLimits, Rollout
from recipec.runtime.settings import Reward
from recipec.spec.language import reinforcement

RECIPE = """\
recipe: 1
name: sample
model: {id: Qwen/Qwen3-8B}
mesh: {accelerator: v6e-8, axes: {fsdp: 8}}
lora: {rank: 16}
data: {train: [data/prompts.jsonl], format: prompt}
train: {objective: grpo, global_batch_size: 64, steps: 60}
rewards:
- {function: scores/rewards.py:correct}
- {numeric_match: {column: answer}, weight: 0.5}
- {json_schema: {file: answer.schema.json}}
- {length: {maximum: 100}}
"""


def constants(text: str, artifact: Path) -> dict[str, Any]:
    """Return the constants of train.py that are about rewards and rollouts."""
    begin, end = text.index("REWARDS = "), text.index("LEARNING_RATE = ")
    values = {"ARTIFACT": artifact, "Reward": Reward, "RewardLimits": RewardLimits, "Rollout": Rollout}
    exec(text[begin:end], values)
    return values


def test_texts_of_any_characters(tmp_path: Path) -> None:
    texts = ["\n", "-", "</answer>", "`$(ls)`|"]
    changed = RECIPE.partition("- {function")[0].replace(
        "steps: 60", "steps: 60, grpo: {mask_truncated: true, stop: " + json.dumps(texts) + "}"
    )
    pattern = "-(.|\n)*\u2028`x`"
    changed += "- {format_match: {pattern: " + json.dumps(pattern) + "}}\n- {exact_match: {column: -x}}\n"
    files = files_of(tmp_path, text=changed)
    values = constants(files["train.py"].decode(), tmp_path)
    assert [reward.options.get("pattern") for reward in values["REWARDS"]] == [pattern, None]
    train = files["train.py"].decode()
    assert ast.literal_eval(train.partition("stop=")[2].partition("),\n")[0] + ")") == tuple(texts)
    assert 'mask_truncated true, stop "\\n" "-"' in files["README.md"].decode()


def test_artifact_has_the_rewards_and_their_files(tmp_path: Path) -> None:
    (tmp_path / "scores").mkdir()
    (tmp_path / "scores" / "rewards.py").write_text("def correct(completions, **columns):\n    return []\n")
    (tmp_path / "answer.schema.json").write_text('{"type": "object"}')
    files = files_of(tmp_path, text=RECIPE)
    for path in ("scores/rewards.py", "answer.schema.json"):
        assert files[path] == (tmp_path / path).read_bytes()
        assert path in json.loads(files["recipe.lock.json"])["files"]
        assert f"`{path}`" in files["README.md"].decode()
    values = constants(files["train.py"].decode(), tmp_path)
    assert values["REWARDS"] == (
        Reward("correct", file=str(tmp_path / "scores" / "rewards.py")),
        Reward("numeric_match", column="answer", options={"tolerance": 1e-6}, weight=0.5),
        Reward("json_schema", options={"schema": '{"type": "object"}'}),
        Reward("length", options={"maximum": 100, "minimum": 0}),
    )
    assert values["REWARD_LIMITS"] == RewardLimits(seconds=60.0, memory_mebibytes=2048)
    assert isinstance(values["ROLLOUT"], Rollout)
    run = files["train.py"].decode().partition("        run(")[2]
    assert all(f"{name.lower()}={name}," in run for name in ("REWARDS", "REWARD_LIMITS", "ROLLOUT"))
    assert "\njsonschema==" in files["requirements-train.txt"].decode()


def test_language_has_the_losses_and_rewards_of_the_runtime() -> None:
    def choices(name: str) -> set[Any]:
        annotation = reinforcement.Grpo.model_fields[name].annotation
        parts = [part for part in get_args(annotation) if get_args(part)] or [annotation]
        return {*get_args(parts[0])}

    assert choices("loss") == {*LOSS_TYPES}
    assert choices("ratio") == {*RATIOS}
    assert choices("kl") == {*KL_ESTIMATORS}
    assert {*reinforcement.KINDS} == {"function", *READY_REWARDS}
    for name, ready in READY_REWARDS.items():
        annotation = reinforcement.Reward.model_fields[name].annotation
        (section,) = (part for part in get_args(annotation) if part is not type(None))
        options = {"schema" if key == "file" else key for key in section.model_fields} - {"column"}
        assert options == {*inspect.signature(ready.make).parameters}, name
        assert ("column" in section.model_fields) == (ready.column is not False), name


SERVED = """\
rollout:
  engine: vllm
  url: http://{host}:9000
  adapter_path: /mnt/shared/adapters
  importance_sampling_clip_min: 0.5
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.2"])
def test_artifact_starts_the_server_that_generates(host: str, tmp_path: Path) -> None:
    """Every flag is one of the pinned vllm-tpu's, and the script is clean shell. What it starts is seen in
    tests/e2e/test_vllm_rollouts.py."""
    files = files_of(
        tmp_path,
        text=RECIPE.partition("- {function")[0] + "- {length: {maximum: 9}}\n" + SERVED.format(host=host),
    )
    rollout = constants(files["train.py"].decode(), tmp_path)["ROLLOUT"]
    assert (rollout.engine, rollout.url, rollout.adapter_path) == (
        "vllm",
        f"http://{host}:9000",
        "/mnt/shared/adapters",
    )
    assert rollout.importance_sampling_correction and rollout.importance_sampling_clip_min == 0.5
    script = files["rollout/serve.sh"].decode()
    used = dict(re.findall(r"^    --([a-z-]+) ?(.*) \\$", script, re.MULTILINE))
    assert used.keys() <= flags().keys()
    assert used | {"host": ""} == {
        "host": "",
        "port": "9000",
        "dtype": "bfloat16",
        "max-model-len": "1024",
        "enable-lora": "",
        "max-lora-rank": "16",
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
    }
    others = host != "127.0.0.1"
    assert used["host"] == ("0.0.0.0" if others else host)
    assert ("VLLM_API_KEY" in script) == ("VLLM_API_KEY" in files["README.md"].decode()) == others
    (tmp_path / "serve.sh").write_text(script)
    assert tool("shellcheck", "--severity=style", tmp_path / "serve.sh") == ""
