"""Tests of where pictures stand in rows, which are refused, and how they are packed, kept and read again."""

from __future__ import annotations

import base64
import io
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from recipec.runtime.data.epochs import Room, pack, pack_pictures
from recipec.runtime.data.picture_rows import MARK, NOWHERE, taken
from recipec.runtime.data.pictures import Limits, decoded, opened
from recipec.runtime.data.prepare import PreparedData, Tokenizing, prepare
from recipec.runtime.data.row_values import Malformed
from recipec.runtime.data.tokenizer import load_tokenizer
from recipec.runtime.errors import UserError
from recipec.runtime.sections import Images
from recipec.runtime.settings import DataSettings, ModelSettings, TrainSettings
from tests.runtime.image_checkpoints import drawn, write

ANSWER = {"role": "assistant", "content": "A red circle."}

TRAIN = TrainSettings(steps=2, global_batch_size=2, micro_batch_size=1)


def asked(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}, ANSWER]


def save_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def prepared(
    folder: Path, cache: Path | None = None, rows: int = 1, train: TrainSettings = TRAIN, **more: Any
) -> PreparedData:
    checkpoint = folder / "checkpoint"
    if not checkpoint.is_dir():
        write(checkpoint, "qwen_vl")
    given = {"train": ("rows.jsonl",), "max_length": 256, "images": Images(), "max_invalid_ratio": 1.0}
    settings = DataSettings(**{**given, **more})
    tokenizer = load_tokenizer(checkpoint, ModelSettings(id="tiny", family="qwen3"), settings, folder)
    return prepare(
        settings, train, rows, tokenizer, folder, 512, Tokenizing(cache, workers=1, model_dir=checkpoint)
    )


def png(size: tuple[int, int] = (20, 30), seed: int = 0) -> bytes:
    buffer = io.BytesIO()
    drawn(size, seed).save(buffer, "PNG")
    return buffer.getvalue()


INLINE = base64.b64encode(png()).decode()

SPELLINGS: dict[str, dict[str, Any]] = {
    "column of paths": {"messages": asked({"type": "image"}), "images": ["a.png"]},
    "column of one path": {"messages": asked({"type": "image"}), "image": "a.png"},
    "column of objects": {"messages": asked({"type": "image"}), "images": [{"bytes": None, "path": "a.png"}]},
    "numbered parts with nulls": {
        "messages": asked({"index": 0, "type": "image", "text": None}),
        "images": [{"path": "a.png"}],
    },
    "part with its path": {"messages": asked({"type": "image", "path": "a.png"})},
    "part with its picture": {"messages": asked({"type": "image", "image": "a.png"})},
    "parts of the Responses API": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": f"data:image/png;base64,{INLINE}"},
                    {"type": "input_text", "text": "What is it?"},
                ],
            },
            {"role": "assistant", "content": [{"type": "output_text", "text": "A red circle."}]},
        ]
    },
    "part with base64": {"messages": asked({"type": "image", "base64": INLINE})},
    "part with a url": {"messages": asked({"type": "image", "url": "a.png"})},
    "a data address with white space": {
        "messages": asked({"type": "image"}),
        "images": [f" DATA:image/png;base64,{INLINE[:40]}\n {INLINE[40:]}"],
    },
    "a data address with percent signs": {
        "messages": asked({"type": "image"}),
        "images": [
            "data:image/png;base64," + INLINE.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D")
        ],
    },
    "OpenAI's data address": {
        "messages": asked({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{INLINE}"}})
    },
    "LLaMA-Factory's mark": {
        "messages": [{"role": "user", "content": "<image>What is it?"}, ANSWER],
        "images": ["a.png"],
    },
    "ShareGPT with a mark": {
        "conversations": [
            {"from": "human", "value": "<image>What is it?"},
            {"from": "gpt", "value": "A red circle."},
        ],
        "images": ["a.png"],
    },
    "column alone": {"messages": [{"role": "user", "content": "What is it?"}, ANSWER], "image": "a.png"},
    "prompt and completion": {
        "prompt": [{"role": "user", "content": "What is it?"}],
        "completion": [ANSWER],
        "images": ["a.png"],
    },
    "instruction": {"instruction": "<image>What is it?", "output": "A red circle.", "images": ["a.png"]},
}


def format_of(row: dict[str, Any]) -> str:
    return "prompt_completion" if "prompt" in row else "instruction" if "instruction" in row else "chat"


def test_every_spelling_of_a_picture_gives_the_same_sample(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    seen = []
    for name, row in SPELLINGS.items():
        save_rows(tmp_path / "rows.jsonl", [row, row])
        run = prepared(
            tmp_path, format=format_of(row), loss_on="completion" if "output" in row else "assistant"
        )
        assert run.report.train.kept == 2, (name, run.report.text())
        assert (run.report.train.pictures, len(run.report.train.notes())) == (2, 0), run.report.text()
        batch = run.micro_batch(0)
        seen.append([batch[key].tobytes() for key in ("tokens", "patches", "image_features")])
    assert all(one == seen[0] for one in seen[1:])


def test_file_addresses_parquet_and_folders_with_metadata(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pictures = tmp_path / "set"
    pictures.mkdir()
    (pictures / "a.png").write_bytes(png())
    text = [{"role": "user", "content": "What is it?"}, ANSWER]
    save_rows(pictures / "metadata.jsonl", [{"file_name": "a.png", "messages": text}] * 2)
    address = (pictures / "a.png").as_uri()
    save_rows(tmp_path / "rows.jsonl", [{"messages": text, "images": [address]}] * 2)
    table = pa.Table.from_pylist([{"messages": text, "images": [{"bytes": png(), "path": None}]}] * 2)
    pq.write_table(table, tmp_path / "rows.parquet")
    digests = set()
    for source in ("set", "rows.jsonl", "rows.parquet"):
        run = _of(tmp_path, source)
        assert run.report.train.pictures == 2, run.report.text()
        digests.add(run.micro_batch(0)["patches"].tobytes())
    assert len(digests) == 1


def _of(folder: Path, source: str) -> PreparedData:
    checkpoint = folder / "checkpoint"
    if not checkpoint.is_dir():
        write(checkpoint, "qwen_vl")
    settings = DataSettings(train=(source,), max_length=256, images=Images(), max_invalid_ratio=1.0)
    tokenizer = load_tokenizer(checkpoint, ModelSettings(id="tiny", family="qwen3"), settings, folder)
    return prepare(settings, TRAIN, 1, tokenizer, folder, 512, Tokenizing(workers=1, model_dir=checkpoint))


def bomb() -> bytes:
    """Return a PNG whose header promises 60,000 x 60,000 pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


def inline(content: bytes) -> dict[str, Any]:
    return {"type": "image", "base64": base64.b64encode(content).decode()}


def gray(most: float, kind: str) -> Image.Image:
    return Image.fromarray(np.linspace(0, most, 600).reshape(20, 30).astype(kind))


def as_bytes(picture: Image.Image, format: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format)
    return buffer.getvalue()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "web": (
        {"messages": asked({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}})},
        "is a web address; a run fetches no picture from the web: download it",
    ),
    "other address": (
        {"messages": asked({"type": "image", "url": "ftp://host/a.png"})},
        "is an address of another kind than file:, data: and gs://",
    ),
    "missing": (
        {"messages": asked({"type": "image"}), "images": ["no.png"]},
        "picture 0 of 'images' is missing",
    ),
    "outside": ({"messages": asked({"type": "image", "path": "../b.png"})}, "lies outside of"),
    "outside by an absolute path": (
        {"messages": asked({"type": "image", "path": "/etc/passwd"})},
        "lies outside",
    ),
    "more places": (
        {"messages": asked({"type": "image"}, {"type": "image"}, {"type": "image"}), "images": ["a.png"] * 2},
        "3 places of pictures, and 2 pictures",
    ),
    "more pictures": (
        {"messages": asked({"type": "image"}), "images": ["a.png"] * 2},
        "1 place of pictures, and 2",
    ),
    "no picture": ({"messages": asked(inline(b"This is text."))}, "is no picture of a known format"),
    "not base64": ({"messages": asked({"type": "image", "base64": "?"})}, "is not base64"),
    "broken": ({"messages": asked(inline(png((90, 90))[:300]))}, "is broken"),
    "bomb": ({"messages": asked(inline(bomb()))}, "too many pixels; at most 89,478,485 are read"),
    "thin": ({"messages": asked(inline(png((2, 900))))}, "aspect ratio must be smaller than 200"),
    "answer": (
        {
            "messages": [
                {"role": "user", "content": "Draw."},
                {"role": "assistant", "content": [inline(png())]},
            ]
        },
        "message 1 (assistant) holds a picture, and the model writes only text",
    ),
    "its own token": (
        {"messages": [{"role": "user", "content": "<|image_pad|>?"}, ANSWER]},
        "the chat template writes <|image_pad|> 1 times, for 0 pictures",
    ),
    "null": ({"messages": asked({"type": "image"}), "images": None}, "1 place of pictures, and 0 pictures"),
    "mark": ({"messages": asked({"type": "text", "text": f"a{MARK}"})}, "U+FDD0"),
    "number": ({"messages": asked({"type": "image"}), "images": [5]}, "is a number, not a path"),
    "no source": ({"messages": asked({"type": "image", "source": {"data": INLINE}})}, "names no picture"),
    "video": (
        {"messages": asked({"type": "video", "video": "a.mp4"})},
        "part 0 of message 0 (user) is of type 'video': only text and pictures are trained on",
    ),
    "16 bits": (
        {"messages": asked(inline(as_bytes(gray(65535, "uint16"))))},
        "has gray values from 0 to 65535, of which RGB keeps 0 to 255: save it with 8 bits a color",
    ),
    "32 bits": ({"messages": asked(inline(as_bytes(gray(1e6, "int32"), "TIFF")))}, "values from 0 to 1e+06"),
    "fractions": ({"messages": asked(inline(as_bytes(gray(1, "float32"), "TIFF")))}, "values from 0 to 1,"),
    **{
        f"mark with {value}": (
            {"messages": [{"role": "user", "content": "<image>What?"}, ANSWER], "images": value},
            "1 place of pictures, and 0 pictures",
        )
        for value in (None, [], [None])
    },
    "twice": (
        {"messages": asked({"type": "image", "path": "a.png"}), "images": ["a.png"]},
        "1 picture in parts of messages, and 1 more in 'images'",
    ),
    "no question": ({"text": "A red circle.", "image": "a.png"}, f"1 picture, and {NOWHERE}"),
}


def test_unusable_pictures_are_malformed_rows_with_their_reason(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.png").write_bytes(png())
    (tmp_path / "b.png").write_bytes(png())
    good = {"messages": asked({"type": "image"}), "images": ["a.png"]}
    save_rows(folder / "rows.jsonl", [row for row, _ in REFUSED.values()] + [good] * 2)
    report = prepared(folder, max_invalid_ratio=1.0).report.train
    assert report.kept == 2
    assert report.malformed.count == len(REFUSED)
    for name, (row, reason) in REFUSED.items():
        save_rows(folder / "rows.jsonl", [row, good, good])
        first = prepared(folder).report.train.malformed.first
        assert len(first) == 1 and reason in first[0].reason, (name, first)


def test_pictures_without_data_images_name_the_key(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    plain = {"messages": [{"role": "user", "content": "What?"}, ANSWER]}
    rows = [SPELLINGS["part with its path"], SPELLINGS["LLaMA-Factory's mark"], plain, plain]
    save_rows(tmp_path / "rows.jsonl", rows)
    report = prepared(tmp_path, images=None).report.train
    assert report.kept == 2
    assert all("data.images: {}" in problem.reason for problem in report.malformed.first)


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    drawn((20, 30)).save(buffer, "JPEG", exif=exif)
    return buffer.getvalue()


def animated() -> bytes:
    buffer = io.BytesIO()
    drawn((20, 30)).save(buffer, "GIF", save_all=True, append_images=[drawn((20, 30), 1)])
    return buffer.getvalue()


KINDS: dict[str, Callable[[], bytes]] = {
    "palette": lambda: as_bytes(drawn((20, 30)).convert("P")),
    "alpha": lambda: as_bytes(drawn((20, 30)).convert("RGBA")),
    "gray": lambda: as_bytes(drawn((20, 30)).convert("L")),
    "black and white": lambda: as_bytes(drawn((20, 30)).convert("1")),
    "16 bits": lambda: as_bytes(gray(255, "uint16")),
    "CMYK": lambda: as_bytes(drawn((20, 30)).convert("CMYK"), "JPEG"),
    "animation": animated,
    "webp": lambda: as_bytes(drawn((20, 30)), "WEBP"),
    **{f"orientation {n}": (lambda n=n: turned(n)) for n in range(1, 9)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_are_opened_as_transformers_opens_them(kind: str, tmp_path: Path) -> None:
    from transformers.image_utils import load_image

    content = KINDS[kind]()
    (tmp_path / "picture").write_bytes(content)
    expected = load_image(str(tmp_path / "picture"))
    image, size = opened(content, "it")
    assert size == (expected.height, expected.width)
    own = decoded(image, "it", Limits())
    np.testing.assert_array_equal(np.asarray(own), np.asarray(expected))


def test_limits_scale_pictures_down_before_the_processor() -> None:
    assert Limits(longest_side=100).of((50, 400)) == (12, 100)
    assert Limits(longest_side=400).of((50, 400)) == (50, 400)
    # As LLaMA-Factory: int(side * sqrt(most / pixels)).
    assert Limits(max_pixels=10_000).of((200, 300)) == (81, 122)
    image, _ = opened(png((50, 400)), "it")
    assert decoded(image, "it", Limits(longest_side=100)).size == (100, 12)


def test_rows_are_packed_by_tokens_and_patches_together(tmp_path: Path) -> None:
    sizes = [(20, 30), (60, 40), (16, 16), (40, 40)]
    for n, size in enumerate(sizes):
        (tmp_path / f"{n}.png").write_bytes(png(size, n))
    rows = [
        {
            "messages": asked(*[{"type": "image"}] * count),
            "images": [f"{(n + k) % 4}.png" for k in range(count)],
        }
        for n, count in enumerate([1, 0, 2, 3, 1, 0, 1, 2, 1, 1, 0, 2])
    ]
    save_rows(tmp_path / "rows.jsonl", rows)
    train = TrainSettings(epochs=1, global_batch_size=2, micro_batch_size=2)
    run = prepared(tmp_path, rows=2, train=train)
    report = run.report.train
    assert report.kept == 12 and report.rows < 12
    found = []
    for index in range(run.total_steps):
        batch = run.micro_batch(index)
        assert batch["patches"].shape[1] == report.row_patches
        # Rows that this host holds are the same rows of the whole batch.
        part = run.micro_batch(index, [1])
        for name, value in part.items():
            if value.ndim:
                np.testing.assert_array_equal(value, batch[name][[1]])
        found += [number for row in batch["patch_images"] for number in np.unique(row) if number]
        for row in range(2):
            inside = batch["image_ids"][row] > 0
            assert (batch["image_features"][row][inside] >= 0).all()
            # A picture's tokens are of one sample, and each sample's pictures follow each other.
            segments = batch["segment_ids"][row][inside]
            assert (np.diff(segments) >= 0).all()
    assert len(found) == report.pictures == sum([1, 0, 2, 3, 1, 0, 1, 2, 1, 1, 0, 2])
    limited = prepared(tmp_path, rows=2, train=train, images=Images(per_row=3))
    for index in range(limited.total_steps):
        assert limited.micro_batch(index)["patch_images"].max() <= 3


def test_packing_depends_on_sizes_alone_and_keeps_every_limit() -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(1, 60, 500)
    pictures = random.integers(0, 4, 500)
    patches = pictures * random.integers(1, 9, 500) * 4
    room = Room(patches=128, pictures=6)
    counts = set()
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(500)
        rows = pack_pictures(lengths, patches, pictures, 100, room, order)
        counts.add(len(rows))
        assert sorted(i for row in rows for i in row) == list(range(500))
        for row in rows:
            chosen = list(row)
            assert (
                lengths[chosen].sum() <= 100 and patches[chosen].sum() <= 128 and pictures[chosen].sum() <= 6
            )
    assert len(counts) == 1
    plain = pack_pictures(lengths, patches * 0, pictures * 0, 100, Room(1), range(500))
    assert len(plain) <= 1.02 * len(pack(lengths, 100, range(500)))


def test_overlong_samples_are_never_cut_within_a_picture(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png((40, 40)))
    late = [
        *asked({"type": "image"}),
        {"role": "user", "content": [{"type": "image"}]},
        {"role": "assistant", "content": "A."},
    ]
    early = [*asked({"type": "image"})[:1], {"role": "assistant", "content": "A red circle. " * 30}]
    rows = [{"messages": late, "images": ["a.png"] * 2}, {"messages": early, "images": ["a.png"]}]
    save_rows(tmp_path / "rows.jsonl", rows)
    run = prepared(tmp_path, max_length=64, overlong="truncate")
    report = run.report.train
    assert (report.kept, report.truncated, report.overlong.count) == (1, 1, 1)
    assert "the cut would go through a picture" in report.overlong.first[0].reason
    assert run.samples.pictures(0) == range(1)


def test_cached_tokens_are_read_again_when_a_picture_changes(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    rows = [{"messages": asked({"type": "image"}), "images": ["a.png"]}] * 2
    rows += [{"messages": asked(inline(png(seed=3)))}] * 2
    save_rows(tmp_path / "rows.jsonl", rows)
    cache = tmp_path / "cache"
    first = prepared(tmp_path, cache)
    before = first.micro_batch(0)
    folders = sorted((cache / "data").iterdir())
    again = prepared(tmp_path, cache)
    assert sorted((cache / "data").iterdir()) == folders
    assert again.fingerprint == first.fingerprint
    for name, value in again.micro_batch(0).items():
        np.testing.assert_array_equal(value, before[name])
    assert len([*(cache / "pictures").rglob("*")]) == 2  # one folder, one picture
    (tmp_path / "a.png").write_bytes(png((60, 60), 1))
    os.utime(tmp_path / "a.png", ns=(1, 1))
    assert prepared(tmp_path, cache).fingerprint != first.fingerprint
    with pytest.raises(UserError, match="has changed since the data was tokenized"):
        for index in range(4):
            first.micro_batch(index)
    other = prepared(tmp_path, cache, images=Images(tokens=4))
    assert other.samples.picture_tokens.max() <= 4


def test_same_text_with_other_pictures_is_another_sample(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(seed=1))
    (tmp_path / "b.png").write_bytes(png(seed=2))
    message = asked({"type": "image"})
    save_rows(tmp_path / "rows.jsonl", [{"messages": message, "images": [f"{n}.png"]} for n in "aab"])
    prints = prepared(tmp_path).samples.fingerprints
    assert prints[0] == prints[1] != prints[2]


def test_settings_that_the_processor_lacks_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    save_rows(tmp_path / "rows.jsonl", [SPELLINGS["column of paths"]] * 2)
    with pytest.raises(UserError, match="cuts no tiles"):
        prepared(tmp_path, images=Images(tiles=4))
    (tmp_path / "checkpoint" / "preprocessor_config.json").unlink()
    with pytest.raises(UserError, match="no preprocessor_config"):
        prepared(tmp_path)


def test_marks_are_taken_in_order_of_the_messages() -> None:
    row = {
        "messages": [
            {"role": "user", "content": "<image>a<image>b"},
            ANSWER,
            {"role": "user", "content": "c<image>"},
            ANSWER,
        ],
        "images": ["0", "1", "2"],
    }
    changed, pictures = taken(row, {})
    assert [value for _, value in pictures] == ["0", "1", "2"]
    assert changed["messages"][0]["content"] == f"{MARK}a{MARK}b"
    assert changed["messages"][2]["content"] == f"c{MARK}"
    assert "images" not in changed
    with pytest.raises(Malformed):
        taken({**row, "images": ["0"]}, {})
