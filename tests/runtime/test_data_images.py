"""Tests of pictures in the data: tokens, masks and patches against transformers' own processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipec.runtime.backends.trl.picture_inputs import PictureInputs
from recipec.runtime.data.prepare import PreparedData, Tokenizing, prepare
from recipec.runtime.data.tokenizer import load_tokenizer
from recipec.runtime.errors import UserError
from recipec.runtime.sections import Images
from recipec.runtime.settings import DataSettings, ModelSettings, TrainSettings
from tests.runtime.image_checkpoints import IMAGES, drawn, reference, write

SIZES = ((50, 30), (24, 24), (9, 61), (37, 200))
"""Heights and widths of the pictures: taller, square, wide and very wide."""

TRAIN = TrainSettings(steps=2, global_batch_size=2, micro_batch_size=1)


def messages(count: int, asked: str = "What is in it?") -> list[dict[str, Any]]:
    parts = [part for n in range(count) for part in ({"type": "image"}, {"type": "text", "text": f"{n}: "})]
    return [
        {"role": "user", "content": [*parts, {"type": "text", "text": asked}]},
        {"role": "assistant", "content": "A red circle."},
    ]


def prepared(
    checkpoint: Path, data: Path, rows: int = 1, cache: Path | None = None, **more: Any
) -> PreparedData:
    settings = DataSettings(**{"train": ("rows.jsonl",), "max_length": 256, "images": Images(), **more})
    tokenizer = load_tokenizer(checkpoint, ModelSettings(id="tiny", family="gemma3"), settings, data)
    tokenizing = Tokenizing(cache, workers=1, model_dir=checkpoint)
    return prepare(settings, TRAIN, rows, tokenizer, data, 512, tokenizing)


def write_rows(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> None:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.parametrize("kind", IMAGES)
def test_tokens_and_patches_are_those_of_transformers_processor(kind: str, tmp_path: Path) -> None:
    """One sample of several pictures, and each picture alone; patches are compared with the whole picture."""
    checkpoint = write(tmp_path / "checkpoint", kind)
    pictures = [drawn(size, n) for n, size in enumerate(SIZES)]
    for n, picture in enumerate(pictures):
        picture.save(tmp_path / f"{n}.png")
    groups = [[n] for n in range(len(SIZES))] + [[3, 0, 1]]
    rows = [{"messages": messages(len(group)), "images": [f"{n}.png" for n in group]} for group in groups]
    write_rows(tmp_path, rows)
    run = prepared(checkpoint, tmp_path, packing=False, shuffle_seed=None, max_length=1024)
    assert run.report.train.kept == len(groups), run.report.text()
    processor = reference(checkpoint, kind)
    for i, group in enumerate(groups):
        batch, sample = run.micro_batch(i), run.samples[i]
        places = iter(pictures[n] for n in group)
        filled = [
            {
                **message,
                "content": [
                    {"type": "image", "image": next(places)} if part["type"] == "image" else part
                    for part in message["content"]
                ],
            }
            if isinstance(message["content"], list)
            else message
            for message in rows[i]["messages"]
        ]
        expected = processor.apply_chat_template(
            [filled], tokenize=True, return_dict=True, processor_kwargs={"return_tensors": "np"}
        )
        ids = np.asarray(expected["input_ids"])[0]
        assert sample.tokens.tolist() == ids.tolist()
        answer = load_tokenizer_text(checkpoint, sample.tokens[sample.targets])
        assert answer == "A red circle.<end>"
        patches = _patches(kind, expected, checkpoint)
        assert batch["patches"].shape[1] >= len(patches)
        own = batch["patches"][0][batch["patch_images"][0] > 0]
        # transformers makes the same numbers; its batches are only padded.
        order = np.lexsort(own.T), np.lexsort(patches.T)
        np.testing.assert_array_equal(own[order[0]], patches[order[1]])
        _check_indices(batch, run, i)
        patches_of_each = 36 if kind in ("gemma3", "llama4", "llava") else None
        inputs = PictureInputs(MODEL_TYPES[kind], patches_of_each, 1, 0, False).arguments(batch)
        assert "pixel_values" in inputs
        for name in (inputs.keys() & expected.keys()) - {"token_type_ids", "mm_token_type_ids"}:
            wanted = np.asarray(expected[name])
            if kind.startswith("gemma4"):  # padded to the most tokens
                wanted = wanted[:, : inputs[name].shape[1]]
            np.testing.assert_array_equal(inputs[name].squeeze(), wanted.squeeze(), err_msg=name)


MODEL_TYPES = {"pixtral": "mistral3", "qwen_vl": "qwen2_5_vl"} | {
    kind: kind for kind in IMAGES if kind not in ("pixtral", "qwen_vl")
}
"""A model type with each kind of processor."""


def load_tokenizer_text(checkpoint: Path, ids: np.ndarray) -> str:
    from transformers import AutoTokenizer

    return str(AutoTokenizer.from_pretrained(checkpoint).decode(ids))


def _patches(kind: str, output: Any, checkpoint: Path) -> np.ndarray:
    """Return the patches of transformers' processor, picture by picture, row by row."""
    pixels = output["pixel_values"]
    if kind in ("qwen_vl", "paddleocr_vl"):
        return np.asarray(pixels, np.float32).reshape(len(pixels), -1)
    if kind.startswith("gemma4"):
        counts = (np.asarray(output["image_position_ids"])[..., 0] >= 0).sum(1)
        return np.concatenate([np.asarray(p)[:n] for p, n in zip(pixels, counts, strict=True)]).astype(
            np.float32
        )
    sizes = output.get("image_sizes", [np.asarray(p).shape[1:] for p in pixels])
    out = []
    for picture, (height, width) in zip(pixels, sizes, strict=True):
        part = np.asarray(picture)[:, :height, :width]
        cut = part.reshape(3, height // 4, 4, width // 4, 4).transpose(1, 3, 0, 2, 4)
        out.append(cut.reshape(-1, 48))
    return np.concatenate(out).astype(np.float32)


def _check_indices(batch: dict[str, np.ndarray], run: PreparedData, sample: int) -> None:
    """Compare the arrays of a row of one sample with the sample's pictures."""
    samples, features = run.samples, batch["image_features"][0]
    pictures = samples.pictures(sample)
    at = features >= 0
    assert features[at].tolist() == list(range(int(samples.picture_tokens[pictures].sum())))
    assert not batch["loss_mask"][0][at].any()
    numbers = np.repeat(np.arange(len(pictures)) + 1, samples.picture_tokens[pictures])
    assert batch["image_ids"][0][at].tolist() == numbers.tolist()
    assert not batch["image_ids"][0][~at].any()
    of_patches = batch["patch_images"][0]
    counts = np.bincount(of_patches)[1:]
    assert counts.tolist() == samples.patches[pictures].tolist()
    assert not batch["patches"][0][of_patches == 0].any()
    ratio = int(samples.patches[pictures].sum() // samples.picture_tokens[pictures].sum())
    assert batch["patches"].shape[1] % ratio == 0
    processor = run.schedule._shape.pixels.processor  # type: ignore[union-attr]
    for number, picture in enumerate(pictures, 1):
        # Each patch of a picture, or of a tile, has its own place.
        places = batch["patch_positions"][0][of_patches == number]
        tiles = len(places) // processor.unit if processor.settings.kind == "llama4" else 1
        for tile in np.split(places, tiles):
            assert len(np.unique(tile, axis=0)) == len(tile)
        assert len(processor.on_canvas(tuple(run.samples.grids[picture]))) == len(places) - (
            processor.unit if tiles > 1 else 0
        )


@pytest.mark.parametrize("kind", ["gemma4", "pixtral", "qwen_vl"])
def test_patches_of_a_feature_are_adjacent_and_a_block_of_the_picture(kind: str, tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "checkpoint", kind)
    drawn((50, 30)).save(tmp_path / "0.png")
    write_rows(tmp_path, [{"messages": messages(1), "images": ["0.png"]}] * 2)
    batch = prepared(checkpoint, tmp_path, packing=False).micro_batch(0)
    merge = 3 if kind == "gemma4" else 2
    places = batch["patch_positions"][0][batch["patch_images"][0] > 0].reshape(-1, merge * merge, 2)
    corners = places[:, :1] // merge * merge
    expected = np.stack(np.divmod(np.arange(merge * merge), merge), -1)
    assert (places - corners == expected).all()
    features = corners[:, 0] // merge
    columns = features[:, 1].max() + 1
    assert (features == np.stack(np.divmod(np.arange(len(features)), columns), -1)).all()


def test_patches_are_cut_from_the_processors_picture_where_they_say(tmp_path: Path) -> None:
    """The positions put the patches back into the picture that transformers' processor makes."""
    checkpoint = write(tmp_path / "checkpoint", "pixtral")
    picture = drawn((37, 90))
    picture.save(tmp_path / "0.png")
    write_rows(tmp_path, [{"messages": messages(1), "images": ["0.png"]}] * 2)
    batch = prepared(checkpoint, tmp_path, packing=False).micro_batch(0)
    used = batch["patch_images"][0] > 0
    patches, places = batch["patches"][0][used].reshape(-1, 3, 4, 4), batch["patch_positions"][0][used]
    whole = np.zeros((3, *(4 * (places.max(0) + 1))), np.float32)
    for patch, (y, x) in zip(patches, places, strict=True):
        whole[:, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4] = patch
    processor = reference(checkpoint, "pixtral").image_processor
    expected = processor(images=[picture], return_tensors="np", patch_size=8)["pixel_values"][0]
    np.testing.assert_array_equal(whole, expected)


def test_pictures_have_at_most_as_many_tiles_as_the_recipe_says(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "checkpoint", "llama4")
    drawn((100, 20)).save(tmp_path / "0.png")
    write_rows(tmp_path, [{"messages": messages(1), "images": ["0.png"]}] * 2)
    tiles = [
        prepared(checkpoint, tmp_path, packing=False, images=Images(tiles=most)).samples.picture_tokens[0]
        // 9
        for most in (6, 3, 1)
    ]
    assert tiles == [6, 4, 1]  # those of the canvas, and one of the whole picture


def test_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    """The model's own server finds pictures by the token of config.json."""
    checkpoint = write(tmp_path / "checkpoint", "qwen_vl")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "image_token_id": 3}))
    write_rows(tmp_path, [{"messages": messages(0)}] * 2)
    with pytest.raises(UserError, match=r"id 6, and in .* a picture's tokens have 3"):
        prepared(checkpoint, tmp_path)


def test_rotary_positions_are_those_of_transformers_qwen_vl(tmp_path: Path) -> None:
    import torch
    import transformers

    checkpoint = write(tmp_path / "checkpoint", "qwen_vl")
    for n, size in enumerate(SIZES):
        drawn(size, n).save(tmp_path / f"{n}.png")
    write_rows(
        tmp_path,
        [
            {"messages": messages(3), "images": ["0.png", "3.png", "1.png"]},
            {"messages": messages(0)},
            {"messages": messages(1), "images": ["2.png"]},
        ],
    )
    run = prepared(checkpoint, tmp_path, packing=False, shuffle_seed=None, max_length=512)
    token = int(run.schedule._shape.pixels.processor.settings.feature)  # type: ignore[union-attr]
    config = transformers.Qwen3VLConfig(image_token_id=token, video_token_id=511)
    with torch.device("meta"):
        model = transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLModel(config)
    for i in range(3):
        batch, sample = run.micro_batch(i), run.samples[i]
        pictures = run.samples.pictures(i)
        grids = [[1, *map(int, run.samples.grids[n])] for n in pictures]
        ids = torch.tensor(sample.tokens)[None].long()
        expected, _ = model.get_rope_index(
            ids,
            mm_token_type_ids=(ids == token).int(),
            image_grid_thw=torch.tensor(grids) if grids else None,
            attention_mask=torch.ones_like(ids),
        )
        own = batch["rotary_positions"][0][: len(sample.tokens)]
        assert own.T.tolist() == expected[:, 0].tolist()
