"""Tests of data sets of the Hugging Face hub, offline: the library's cache, and its errors."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest

from recipec.runtime.data.file_rows import address_of
from recipec.runtime.data.sources import open_rows
from recipec.runtime.data.token_cache import remote_content
from recipec.runtime.errors import UserError
from recipec.runtime.settings import DataSettings, Source

NAME = "someone/verses"
TEXTS = [f"verse {i}" for i in range(50)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return write_cache(tmp_path, monkeypatch)


def texts(source: Source) -> list[tuple[str, str | None]]:
    rows = open_rows([source], DataSettings(train=(), max_length=64, format="text", packing=False), Path())[0]
    return [(row.origin, row.completion) for row in rows]


def error_of(source: Source) -> UserError:
    with pytest.raises(UserError) as error:
        texts(source)
    return error.value


@pytest.mark.parametrize(
    ("split", "which"),
    [(None, range(50)), ("test", range(4)), ("train[:10%]", range(5)), ("test+train[49:]", [0, 1, 2, 3, 49])],
)
def test_cached_hub_dataset_splits_are_read_offline(cache: Path, split: str | None, which: Any) -> None:
    rows = texts(Source(f"hf://{NAME}", split=split, config="short"))
    assert [text for _, text in rows] == [TEXTS[i] for i in which]
    assert rows[-1][0] == f"hf://{NAME}[{split or 'train'}]#{len(which) - 1}"


def test_hub_dataset_with_several_configs_needs_a_config_name(cache: Path) -> None:
    assert texts(Source(f"hf://{NAME}", config="long", split="train[:1]"))[0][1] == TEXTS[0] * 2
    error = error_of(Source(f"hf://{NAME}"))
    assert "Please specify which configuration" in error.message and "short" in error.message
    error = error_of(Source(f"hf://{NAME}", config="middle"))
    assert "configuration 'middle', cannot be read" in error.message
    assert "['long', 'short']" in error.message


def test_missing_hub_split_is_named_in_the_error(cache: Path) -> None:
    error = error_of(Source(f"hf://{NAME}", split="validation", config="short"))
    assert f"hf://{NAME}, split 'validation' of the configuration 'short', cannot be read: " in error.message
    assert error.help is not None and "train[:10%]" in error.help
    assert "['train', 'test']" in error.message


def test_uncached_hub_dataset_offline_gives_one_sentence_error(cache: Path) -> None:
    error = error_of(Source("hf://someone/prose"))
    assert error.message == (
        f"hf://someone/prose is not in the cache {cache}, and the Hugging Face hub is not asked "
        "(HF_HUB_OFFLINE is set)"
    )
    assert error.help is not None and "HF_DATASETS_CACHE" in error.help and "save_to_disk" in error.help


def test_gated_hub_dataset_error_names_hf_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise datasets.exceptions.DatasetNotFoundError(
            "Dataset 'someone/verses' is a gated dataset on the Hub."
        )

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    error = error_of(Source(f"hf://{NAME}"))
    assert f"hf://{NAME} cannot be loaded: Dataset 'someone/verses' is a gated" in error.message
    assert error.help is not None and "HF_TOKEN" in error.help


def test_load_dataset_receives_the_recipe_config_split_and_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def answer(*given: Any, **named: Any) -> datasets.Dataset:
        asked.append((given, named))
        return datasets.Dataset.from_dict({"text": ["a"]})

    monkeypatch.setattr(datasets, "load_dataset", answer)
    texts(Source(f"hf://{NAME}"))
    texts(Source(f"hf://datasets/{NAME}@1a2b3c", config="short", split="test[:50%]"))
    assert asked == [
        ((NAME, None), {"split": "train", "revision": None}),
        ((NAME, "short"), {"split": "test[:50%]", "revision": "1a2b3c"}),
    ]
    assert address_of("hf://o/n@v1") == ("o/n", "v1")


def test_hub_dataset_with_the_name_of_a_local_folder_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert "has the same name as the folder" in error_of(Source(f"hf://{NAME}")).message


def test_cache_key_of_a_file_on_the_hub_is_its_blob(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    blobs = {"datasets/some/set/a.jsonl": "c0ffee"}

    def url_to_fs(address: str) -> tuple[Any, str]:
        system = SimpleNamespace(
            isdir=lambda path: path not in blobs, info=lambda path: {"size": 4, "blob_id": blobs[path]}
        )
        return system, address.removeprefix("hf://")

    monkeypatch.setattr(fsspec.core, "url_to_fs", url_to_fs)
    ((name, *told),) = remote_content(Source("hf://datasets/some/set/a.jsonl"))
    assert name == "datasets/some/set/a.jsonl" and "c0ffee" in told


def write_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create load_dataset's cache of someone/verses, with two configurations, and block the connection."""
    folder = tmp_path / "cache"
    for config, texts in (("short", TEXTS), ("long", [text * 2 for text in TEXTS])):
        files = {}
        for split, part in (("train", texts), ("test", texts[:4])):
            files[split] = str(tmp_path / f"{config}-{split}.parquet")
            datasets.Dataset.from_dict({"text": part}).to_parquet(files[split])
        built = datasets.load_dataset_builder("parquet", config, data_files=files, cache_dir=str(folder))
        built.download_and_prepare()
        made = Path(built.cache_dir)
        home = folder / "someone___verses" / config / "0.0.0" / "0123456789abcdef"
        home.parent.mkdir(parents=True)
        shutil.move(made, home)
        info = home / "dataset_info.json"
        info.write_text(info.read_text().replace(made.parts[-3], config))
        for file in home.glob("parquet-*.arrow"):
            file.rename(home / file.name.replace("parquet-", "verses-"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return folder
