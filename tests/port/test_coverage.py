"""Test port/scripts/coverage.py on a folder of a few configs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipec.port.scripts import coverage

AXOLOTL = """\
base_model: {model}
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
datasets:
  - path: some/notes
    type: alpaca
sequence_len: 512
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 1
learning_rate: 2e-4
"""
FILES = {
    "axolotl/carried.yml": AXOLOTL.format(model="Qwen/Qwen3-0.6B"),
    "axolotl/unknown.yaml": AXOLOTL.format(model="nobody/knows-this-7b"),
    "axolotl/images.yml": AXOLOTL.format(model="Qwen/Qwen3-0.6B") + "processor_type: AutoProcessor\n",
    "axolotl/malformed.yml": "base_model: [\n",
    "axolotl/large.yml": AXOLOTL.format(model="meta-llama/Llama-3.3-70B-Instruct").replace(
        "adapter: lora", ""
    ),
    "accelerate.yaml": "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 4\n",
    "llamafactory/examples/sft.yaml": """\
model_name_or_path: Qwen/Qwen3-0.6B
stage: sft
do_train: true
finetuning_type: lora
dataset: notes
template: qwen3
""",
    "llamafactory/examples/infer.yaml": """\
model_name_or_path: Qwen/Qwen3-0.6B
finetuning_type: lora
template: qwen3
adapter_name_or_path: out
""",
    "llamafactory/data/dataset_info.json": '{"notes": {"hf_hub_url": "some/notes"}}',
    "handbook/recipes/dpo/config.yaml": """\
model_name_or_path: Qwen/Qwen3-0.6B
use_peft: true
dataset_mixture:
  datasets: [{id: some/pairs, split: train_prefs, columns: [chosen, rejected], weight: 1.0}]
""",
}


def test_coverage_script_counts_configs_by_dialect_and_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    coverage.main([str(tmp_path), "--json"])
    found = {each["file"]: each for each in json.loads(capsys.readouterr().out)}
    assert {name: (each["dialect"], each["reason"]) for name, each in found.items()} == {
        "accelerate.yaml": ("", "no config of these tools"),
        "axolotl/carried.yml": ("Axolotl", ""),
        "axolotl/images.yml": ("Axolotl", "pictures or sound"),
        "axolotl/large.yml": ("Axolotl", ""),
        "axolotl/malformed.yml": ("", "cannot be read"),
        "axolotl/unknown.yaml": ("Axolotl", "model not known"),
        "handbook/recipes/dpo/config.yaml": ("TRL", ""),
        "llamafactory/data/dataset_info.json": ("", "no config of these tools"),
        "llamafactory/examples/infer.yaml": ("", "fine-tunes nothing"),
        "llamafactory/examples/sft.yaml": ("LLaMA-Factory", ""),
    }
    assert "nobody/knows-this-7b" in found["axolotl/unknown.yaml"]["errors"][0]
    coverage.main([str(tmp_path)])
    printed = capsys.readouterr().out
    assert "| Axolotl | 2 | 4 (50 %) | 3 (67 %) | 2 (100 %) |" in printed
    assert "| all | 4 | 6 (67 %) | 5 (80 %) | 4 (100 %) |" in printed
    assert "| model not known | 1 |" in printed and "1 cannot be read, 1 fine-tunes nothing" in printed
    assert sorted(tmp_path.rglob("*")) == before


COMMANDS = {
    "sft.sh": "accelerate launch --num_processes 8 open_instruct/finetune.py --model_name_or_path {model} "
    "--dataset_mixer_list some/talks 1.0 --max_seq_length 1024\n",
    "two.sh": "python open_instruct/finetune.py --model_name_or_path Qwen/Qwen3-0.6B "
    "--dataset_mixer_list some/talks 1.0\npython open_instruct/grpo_fast.py --model_name_or_path "
    "Qwen/Qwen3-0.6B --dataset_mixer_list some/prompts 1.0 --total_episodes 64\n",
    "none.sh": "echo nothing\n",
    "open.sh": "echo 'not closed\n",
}


def test_coverage_script_counts_commands_of_shell_scripts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in COMMANDS.items():
        (tmp_path / name).write_text(text.replace("{model}", "nobody/knows-this-7b"), encoding="utf-8")
    folder = Path.cwd()
    coverage.main([str(tmp_path), "--commands", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert {each["file"]: (each["dialect"], each["reason"]) for each in found} == {
        "open.sh:1": ("", "cannot be read"),
        "sft.sh:1": ("open-instruct", "model not known"),
        "two.sh:1": ("open-instruct", ""),
        "two.sh:2": ("open-instruct", "reward without a counterpart"),
    }
    assert Path.cwd() == folder
