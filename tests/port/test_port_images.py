"""Test the chat templates of ported runs with pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from recipec.compiler.lowering.hardware import from_name
from recipec.port.meaning import templates
from recipec.port.port import Asked, port
from recipec.port.scripts import picture_configs
from recipec.runtime.data.picture_rows import MARK
from recipec.runtime.data.template import ChatTemplate
from tests.port.dialects import base, beside, ported

TALK = [
    {"role": "user", "content": f"{MARK}What is it?"},
    {"role": "assistant", "content": "A fox."},
    {"role": "user", "content": "And here?"},
    {"role": "assistant", "content": "The same."},
]
QWEN = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is it?<|im_end|>\n"
    "<|im_start|>assistant\nA fox.<|im_end|>\n"
    "<|im_start|>user\nAnd here?<|im_end|>\n<|im_start|>assistant\nThe same.<|im_end|>\n"
)
GEMMA = (
    "<bos><start_of_turn>user\n<start_of_image>What is it?<end_of_turn>\n"
    "<start_of_turn>model\nA fox.<end_of_turn>\n"
    "<start_of_turn>user\nAnd here?<end_of_turn>\n<start_of_turn>model\nThe same.<end_of_turn>\n"
)
"""The texts that the models' own templates write."""


@pytest.mark.parametrize(
    ("model", "template", "written"),
    [
        ("Qwen/Qwen3-VL-4B-Instruct", "qwen3_vl_nothink", QWEN),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", "qwen3_vl_nothink", QWEN),
        (
            "Qwen/Qwen2-VL-7B-Instruct",
            "qwen2_vl",
            f"<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{QWEN}",
        ),
        ("google/gemma-3-4b-it", "gemma3", GEMMA),
    ],
)
def test_llamafactory_templates_have_the_places_of_pictures(
    model: str, template: str, written: str, tmp_path: Path
) -> None:
    named = {"model_name_or_path": model, "template": template, "dataset": "seen"}
    info = beside("llamafactory")["dataset_info"]
    made = ported("llamafactory", tmp_path, {**base("llamafactory"), **named}, dataset_info=info)
    chat = ChatTemplate(made.value("data.chat_template"), {"bos_token": "<bos>"})
    text, spans = chat.render_marked(TALK)
    assert text.rstrip("\n") == written.rstrip("\n")
    assert [text[start:end].partition("<")[0] for start, end in spans] == ["A fox.", "The same."]


@pytest.mark.parametrize(
    ("model", "template"),
    [
        ("Qwen/Qwen2-VL-7B-Instruct", "qwen2_vl"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2_vl"),
        ("mistral-community/pixtral-12b", "pixtral"),
    ],
)
def test_axolotl_templates_that_are_the_models_own(model: str, template: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"base_model": model, "processor_type": "AutoProcessor"}
    named = {**base("axolotl"), **changes, "chat_template": template}
    made = ported("axolotl", tmp_path, named)
    assert made.value("data.chat_template") is None
    assert made.value("data.loss_on") == "assistant"


def test_other_templates_of_axolotl_have_the_places_of_pictures(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"base_model": "Qwen/Qwen3-VL-8B-Instruct", "processor_type": "AutoProcessor"}
    made = ported("axolotl", tmp_path, {**base("axolotl"), **changes, "chat_template": "chatml"})
    chat = ChatTemplate(made.value("data.chat_template"), {})
    assert "user\n<|vision_start|><|image_pad|><|vision_end|>What is it?" in chat.render(TALK)


def test_templates_of_the_user_stay_as_they_are() -> None:
    assert templates.with_places("{% for m in messages %}{{ m.content }}{% endfor %}", "[IMG]") is None


def test_every_model_with_a_tower_has_a_place_for_pictures() -> None:
    from recipec.port.tool_names import known
    from recipec.runtime.model.families.towers import READERS

    assert READERS.keys() <= known("places").keys()


def test_command_of_trls_script_for_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script reads rows of any length, whatever its flag says."""
    monkeypatch.chdir(tmp_path)
    command = (
        "accelerate launch --num_processes 4 examples/scripts/sft_vlm.py --dataset_name our/pictures "
        "--model_name_or_path llava-hf/llava-1.5-7b-hf --max_length 9 --output_dir out --dtype bfloat16 "
        "--use_peft --lora_target_modules q_proj v_proj\n"
    )
    (tmp_path / "run.sh").write_text(command)
    made = port([Path("run.sh")], Asked(from_name("v5p-8"), writes=False))
    assert made.whole and made.ledger is not None, made.diagnostics
    expected = {
        "model.id": "llava-hf/llava-1.5-7b-hf",
        "data.images": {},
        "data.format": "chat",
        "data.loss_on": "all",
        "data.overlong": "error",
        "data.max_length": 4096,
    }
    assert {path: made.ledger.value(path) for path in expected} == expected


def test_counted_configs_are_those_that_train_on_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seeing = {**base("axolotl"), "base_model": "google/gemma-3-4b-it", "processor_type": "AutoProcessor"}
    placed: dict[str, dict[str, Any]] = {
        "axolotl/examples/a/seeing.yml": seeing,
        "axolotl/examples/a/unknown.yaml": {**seeing, "base_model": "google/gemma-3n-E2B-it"},
        "axolotl/examples/a/text.yaml": base("axolotl"),
        "llamafactory/examples/x.yaml": {**base("llamafactory"), "image_max_pixels": 9, "stage": "dpo"},
        "unsloth/nb/Kaggle-Gemma_Vision.ipynb": {},
    }
    for name, content in placed.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(yaml.safe_dump(content))
    monkeypatch.setattr(
        "sys.argv", ["pictures", *(str(tmp_path / tool) for tool in ("axolotl", "llamafactory", "unsloth"))]
    )
    picture_configs.main()
    told = capsys.readouterr().out
    assert "Axolotl: examples/a/unknown.yaml\n    E0803" in told
    assert told.endswith("| all | 2 | 1 (50 %) |\n")
