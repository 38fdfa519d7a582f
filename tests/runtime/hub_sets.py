"""A data set of the Hugging Face hub in its library's cache, without the hub."""

from __future__ import annotations

import shutil
from pathlib import Path

import datasets
import pytest

NAME = "someone/verses"
TEXTS = [f"verse {i}" for i in range(50)]


def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
