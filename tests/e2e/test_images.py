"""Whole runs on drawn pictures: what a model learns from them, and a server's answers about them.

vLLM on a CPU computes pictures' tokens causally in every model. A picture is therefore one token in the model
that is served, whose mask is the same in both directions.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from recipec.compiler.catalog import facts_of
from tests.e2e import vllm_cpu
from tests.e2e.gemma3 import run
from tests.e2e.greedy import load
from tests.vision_checkpoints import SIGLIP, TEXT, make_gemma3, publish

SIDE = SIGLIP["image_size"]
COLORS = {"red": (220, 40, 40), "green": (40, 190, 60), "blue": (50, 70, 220)}
SHAPES = ("circle", "square", "stripe")
NUMBERS = ("one", "two", "three")
KINDS = [*itertools.product(NUMBERS, COLORS, SHAPES)]
ASKED = "What is this?"
END = facts_of("gemma3").tokens.turn_end
LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
RECIPE = """\
recipe: 1
name: shapes
model: {{id: ./base, dtype: float32}}
mesh: {{accelerator: cpu-4, axes: {{fsdp: 4, tp: 1}}}}
lora: {lora}
data: {{train: [train.jsonl], format: chat, max_length: 128, packing: true, images: {{}}}}
train:
  steps: {steps}
  global_batch_size: 8
  micro_batch_size: 2
  optimizer: {{learning_rate: {rate}, weight_decay: 0}}
  schedule: {{name: cosine, warmup_ratio: 0.05}}
  log: {{every: 10}}
checkpoint: {{every_steps: {every}}}
merge: {{output: merged, dtype: float32}}
"""


def draw(color: str, shape: str, count: int, place: random.Random) -> Image.Image:
    """Draw some shapes, each in a quarter of the picture of its own, of sizes and at places that differ."""
    picture = Image.new("RGB", (SIDE, SIDE), (235, 235, 235))
    half = SIDE // 2
    for left, top in place.sample([(0, 0), (half, 0), (0, half), (half, half)], count):
        size = place.randint(7, 9)
        x, y = (start + place.randint(1, half - size - 1) for start in (left, top))
        pen, box = ImageDraw.Draw(picture), (x, y, x + size, y + size)
        if shape == "circle":
            pen.ellipse(box, fill=COLORS[color])
        elif shape == "square":
            pen.rectangle(box, outline=COLORS[color], width=2)
        else:
            pen.rectangle((x, y + size // 3, x + size, y + size // 3 + 2), fill=COLORS[color])
    return picture


def drawn(count: int, seed: int) -> list[tuple[Image.Image, str]]:
    """Return pictures with what they show: as many of each kind, in random order."""
    place = random.Random(seed)
    chosen = [KINDS[i % len(KINDS)] for i in range(count)]
    place.shuffle(chosen)
    return [
        (draw(color, shape, 1 + NUMBERS.index(number), place), f"{number} {color} {shape}")
        for number, color, shape in chosen
    ]


def write_data(folder: Path, pictures: Sequence[tuple[Image.Image, str]]) -> None:
    """Write conversations about pictures, and one without."""
    (folder / "pictures").mkdir()
    rows = [{"messages": [turn("user", "Hello"), turn("assistant", "Hello")], "images": []}]
    for number, (picture, answer) in enumerate(pictures):
        name = f"pictures/{number}.png"
        picture.save(folder / name)
        parts = [{"type": "image"}, {"type": "text", "text": ASKED}]
        rows.append({"messages": [turn("user", parts), turn("assistant", answer)], "images": [name]})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def trained(root: Path, folder: Path, runs: Sequence[str], **values: Any) -> Path:
    """Build the recipe in a folder, train it with each of the arguments, and return the merged folder."""
    (folder / "shapes.yaml").write_text(RECIPE.format(**values), "utf-8")
    run(root, "-m", "recipec.compiler.cli.main", "build", folder / "shapes.yaml", "-o", folder / "generated")
    artifact, places = folder / "generated" / "shapes", ("--model", folder / "base")
    for number, arguments in enumerate(runs):
        output = folder / f"run{number}"
        for more in arguments.split(","):
            words = (*places, "--output", output, "--data-dir", folder, *more.split())
            assert run(root, artifact / "train.py", *words).startswith("done:")
        run(
            root,
            artifact / "merge.py",
            *places,
            "--output",
            output,
            "--checkpoint",
            output / "checkpoints",
            "--verify",
        )
    return folder / "run0" / "merged"


def answers(folder: Path, pictures: Sequence[Image.Image]) -> list[str]:
    """Return the answers of transformers' model of a folder about pictures, as texts."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in generated(folder, pictures)]


def generated(folder: Path, pictures: Sequence[Image.Image]) -> list[list[int]]:
    """Ask transformers' model of a folder about pictures, and return the tokens before the turn's end."""
    import torch
    import transformers

    model, processor = load(folder), transformers.AutoProcessor.from_pretrained(folder)
    out = []
    for picture in pictures:
        parts = [{"type": "image"}, {"type": "text", "text": ASKED}]
        text = processor.apply_chat_template([turn("user", parts)], add_generation_prompt=True)
        # The template begins with <bos>, as the tokenizer does.
        inputs = processor(text=text, images=[picture], add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0]
        out.append(_until(END, tokens[inputs["input_ids"].shape[1] :].tolist()))
    return out


def _until(end: int, tokens: list[int]) -> list[int]:
    """Return the tokens before the first `end`."""
    return tokens[: tokens.index(end)] if end in tokens else tokens


@pytest.mark.nightly
def test_a_model_learns_what_pictures_show(root: Path, tmp_path: Path) -> None:
    """Train a random text model over a random tower that stays as it is, on 27 kinds of pictures."""
    make_gemma3(tmp_path / "base", texts=[ASKED, *(answer for _, answer in drawn(27, 0))])
    write_data(tmp_path, drawn(2160, 1))
    held_out = drawn(81, 2)
    merged = trained(root, tmp_path, [""], lora="null", steps=800, rate="3.0e-3", every=800)
    pictures, expected = zip(*held_out, strict=True)
    right = {
        name: sum(a == b for a, b in zip(answers(folder, pictures), expected, strict=True)) / len(expected)
        for name, folder in {"before": tmp_path / "base", "after": merged}.items()
    }
    print(right)
    assert right["before"] <= 2 / len(KINDS)
    assert right["after"] >= 0.9


@pytest.mark.parametrize(
    "more",
    [
        pytest.param("", marks=pytest.mark.nightly),
        pytest.param(", vision: true, modules_to_save: [projector]", marks=pytest.mark.e2e),
    ],
)
def test_a_resumed_run_is_the_same_and_keeps_what_is_frozen(more: str, root: Path, tmp_path: Path) -> None:
    _made(tmp_path)
    lora = f"{{rank: 4, dropout: 0.1, dtype: float32{more}}}"
    merged = trained(root, tmp_path, ["", "--steps 2,--resume"], lora=lora, steps=4, rate="1.0e-2", every=1)
    one, other = (load_file(tmp_path / f"run{i}" / "merged" / "model.safetensors") for i in range(2))
    assert all(np.array_equal(value, other[name]) for name, value in one.items())
    base = load_file(tmp_path / "base" / "model.safetensors")
    tower = [name for name in base if "vision_tower" in name or "projector" in name]
    linear = ("_proj.weight", "fc1.weight", "fc2.weight", "projection_weight", "soft_emb_norm.weight")
    changed = [name for name in tower if not np.array_equal(base[name], one[name])]
    assert changed == ([name for name in tower if name.endswith(linear)] if more else [])
    expected = answers(merged, [picture for picture, _ in drawn(6, 3)])
    assert len(set(expected)) > 1, "the answer depends on the picture"


@pytest.mark.nightly
def test_the_server_answers_as_transformers(root: Path, tmp_path: Path) -> None:
    _made(tmp_path)
    lora = "{rank: 4, dtype: float32}"
    merged = trained(root, tmp_path, [""], lora=lora, steps=4, rate="1.0e-2", every=1)
    pictures = [picture for picture, _ in drawn(6, 3)]
    expected = generated(merged, pictures)
    assert len(set(map(tuple, expected))) > 1, "the answer depends on the picture"
    with vllm_cpu.serve(merged, "images") as server:
        assert [_served(server, picture) for picture in pictures] == expected


def _made(place: Path) -> None:
    """Make a model whose answers depend on the picture, and its data."""
    make_gemma3(place / "base", texts=[ASKED], tokens=1, head_dim=32, **LAYERS)
    _strengthen(place / "base")
    _newlines(place / "base")
    publish(place / "base")  # vLLM 0.32 does not know the names that transformers 5.12 saves
    write_data(place, drawn(40, 1))


def _strengthen(folder: Path) -> None:
    """Make the layers outweigh the embedding, which alone would repeat the last token."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, value in tensors.items():
        if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
            value += 7
        if name.endswith("embed_tokens.weight"):
            value[[*facts_of("gemma3").tokens.media.values()]] = 0  # never the answer
    save_file(tensors, file, metadata={"format": "pt"})


def _newlines(folder: Path) -> None:
    """Add the tokens of several newlines, which Gemma's tokenizer has and vLLM looks up."""
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_tokens([AddedToken("\n" * count, normalized=False) for count in range(1, 5)])
    assert tokenizer.get_vocab_size() <= TEXT["vocab_size"]
    tokenizer.save(file)


def _served(server: vllm_cpu.Server, picture: Image.Image) -> list[int]:
    """Return the tokens of the server's answer: its text leaves out the bytes of half a character."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    address = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": address}}, {"type": "text", "text": ASKED}]
    body = {"model": "base", "messages": [turn("user", parts)], "max_tokens": 8, "temperature": 0}
    body["return_token_ids"] = True
    (answer,) = server.post("/v1/chat/completions", body)["choices"]
    return _until(END, answer["token_ids"])
