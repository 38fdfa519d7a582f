"""Tests of `recipe preview` for samples with pictures."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
from PIL import Image
from typer.testing import CliRunner

from recipec.compiler.cli.main import app
from tests.runtime.image_checkpoints import drawn, reference, save, write

RECIPE = """\
recipe: 1
name: pictures
model: {id: ./checkpoint}
mesh: {accelerator: cpu-1, axes: {fsdp: 1}}
lora: {rank: 4, targets: [q_proj]}
data: {train: [rows.jsonl], max_length: 128, images: {}, max_invalid_ratio: 0.5}
train: {epochs: 1, global_batch_size: 1, micro_batch_size: 1}
checkpoint: {directory: run}
"""

CONFIG = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "mm_tokens_per_image": 9,
    "text_config": {
        "model_type": "gemma3_text",
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 24,
        "patch_size": 4,
    },
}


def test_preview_shows_pictures_as_the_model_sees_them(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "checkpoint", "gemma3")
    save(checkpoint / "config.json", CONFIG)
    picture = drawn((20, 30))
    picture.save(tmp_path / "a.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    rows = [
        {
            "messages": [
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
                {"role": "assistant", "content": "A red circle."},
            ],
            "images": [name],
        }
        for name in ("a.png", "a.png", "broken.png")
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    page = tmp_path / "page.html"
    command = ["preview", str(tmp_path / "recipe.yaml"), "-n", "1", "--html", str(page)]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "[picture 1: 30 x 20 pixels, seen as 24 x 24, 9 tokens]" in done.stdout
    assert "<image_soft_token>" not in done.stdout
    assert "2 of 3 samples kept (1 malformed)" in done.stdout
    assert "picture 0 of 'images' is no picture of a known format" in done.stdout
    assert "2 pictures of 18 tokens, in rows of 72 patches, 100.0 % full" in done.stdout
    found = re.findall(r"data:image/png;base64,([\w+/=]+)", page.read_text(encoding="utf-8"))
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(found[0]))))
    output = reference(checkpoint, "gemma3").image_processor(images=[picture], return_tensors="np")
    expected = (np.asarray(output["pixel_values"][0]).transpose(1, 2, 0) + 1) * 127.5
    assert len(found) == 1
    np.testing.assert_allclose(shown, expected, atol=1)
