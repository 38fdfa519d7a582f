"""Read the rows of Hugging Face data sets: from the hub, saved on disk, or a folder of data files."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..settings import Source
from ..untrusted import check_ends
from .file_rows import (
    BATCH,
    ENDINGS,
    DataFile,
    DataPath,
    Record,
    Shard,
    address_of,
    counted_rows,
    explained,
    kind_of,
    read_file,
    rows_of,
)

TOKEN = "a private or gated one needs a token that may read it: set HF_TOKEN, or run `hf auth login`"


class HubDataset:
    """A data set of the hub: hf://OWNER/NAME, or hf://OWNER/NAME@REVISION.

    Split expressions follow `datasets`: train[:10%], train+test, train[100:200]. The methods raise UserError
    if it cannot be downloaded, or has no such configuration or split.
    """

    def __init__(self, source: Source) -> None:
        self._source, self._split = source, source.split or "train"

    def rows(self) -> Iterator[Record]:
        """Read the rows in the hub's order. `datasets` downloads them into its cache, and maps them into
        memory."""
        yield from _numbered(f"{self._source.path}[{self._split}]", self._loaded())

    def count(self, most: int | None = None) -> int:
        """Count the rows; this downloads them."""
        return len(self._loaded())

    def shards(self) -> list[Shard]:
        """Return the shards, identified by their commit. They are read in turn, and nothing is kept on disk.

        Raises:
            UserError: also if a part of a split is requested, which would need counting.
        """
        import huggingface_hub

        path, split = self._source.path, self._split
        refuse_part(path, split)
        name, revision = address_of(path)
        try:
            commit = str(huggingface_hub.HfApi().dataset_info(name, revision=revision).sha)
        except Exception as error:
            raise self._explained(error) from error
        data = self._loaded(revision=commit, streaming=True)
        shards = range(data.num_shards)

        def rows(shard: int, first: int) -> Iterator[Record]:
            origin = f"{path}[{split}]" + (f" shard {shard}" if len(shards) > 1 else "")
            try:
                yield from _numbered(origin, data.shard(len(shards), shard).skip(first), first)
            except Exception as error:
                raise self._explained(error) from error

        return [Shard([path, commit, i], partial(counted_rows, partial(rows, i))) for i in shards]

    def _loaded(self, **more: Any) -> Any:
        """Return the datasets.Dataset.

        Args:
            more: further arguments of `load_dataset`.
        """
        import datasets

        path = self._source.path
        name, revision = address_of(path)
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
            raise UserError(
                f"{path} is not the address of a data set",
                "write hf://OWNER/NAME or hf://OWNER/NAME@REVISION; of one of its files, "
                "hf://datasets/OWNER/NAME/FILE.jsonl",
            )
        if Path(name).is_dir():
            raise UserError(
                f"{path} has the same name as the folder ./{name}, which would be read instead",
                "start from another working directory",
            )
        try:
            options = {"split": self._split, "revision": revision, **more}
            return datasets.load_dataset(name, self._source.config, **options)
        except Exception as error:
            raise self._explained(error) from error

    def _explained(self, error: Exception) -> UserError:
        import datasets

        source, split = self._source, self._split
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, datasets.exceptions.DatasetNotFoundError):
            return UserError(f"{source.path} cannot be loaded: {reason}", f"check the name; {TOKEN}")
        if isinstance(error, ConnectionError):
            offline = datasets.config.HF_HUB_OFFLINE
            state = "is not asked (HF_HUB_OFFLINE is set)" if offline else f"cannot be reached: {reason}"
            return UserError(
                f"{source.path} is not in the cache {datasets.config.HF_DATASETS_CACHE}, and the Hugging "
                f"Face hub {state}",
                "load it once on a machine with a connection, and copy that cache here (HF_DATASETS_CACHE "
                "names its folder); or save it with save_to_disk, and name that folder",
            )
        wanted = f"split {split!r}" + (f" of the configuration {source.config!r}" if source.config else "")
        return UserError(
            f"{source.path}, {wanted}, cannot be read: {reason}",
            "set split to a split's name or to a part of one, as in train[:10%]; set config to a "
            "configuration's name",
        )


class DataFolder:
    """A folder: a data set of save_to_disk, or data files, whose names give the split as on the hub.

    The methods raise UserError if it is no data set, is broken, or has no such split.

    Args:
        split: as in train[:10%]; None takes train, or the only split.
    """

    def __init__(self, place: DataPath, split: str | None) -> None:
        self._place, self._split = place, split

    def rows(self) -> Iterator[Record]:
        """Read the rows in order."""
        saved, files, lengths = _in_folder(self._place)
        for name, start, stop in _parts(self._place, self._split, lengths):
            if saved is not None:
                data = saved[name]
                part = data if stop is None else data.select(range(start, stop))
                yield from _numbered(self._origin(saved, name), part, start)
            else:
                rows = (record for file in files[name] for record in read_file(file))
                yield from islice(rows, start, stop)

    def count(self, most: int | None = None) -> int:
        """Count the rows."""
        _, _, lengths = _in_folder(self._place)
        parts = _parts(self._place, self._split, lengths)
        return sum((lengths[name] if stop is None else stop) - start for name, start, stop in parts)

    def shards(self) -> list[Shard]:
        """Return the files of the split, or what save_to_disk wrote as one shard.

        Raises:
            UserError: also if a part of a split is requested, which would need counting.
        """
        refuse_part(self._place.name, self._split)
        saved, files, lengths = _in_folder(self._place)
        ((name, _, _),) = _parts(self._place, self._split, lengths)
        if saved is None:
            return [shard for file in files[name] for shard in DataFile(file).shards()]
        data, origin = saved[name], self._origin(saved, name)

        def rows(first: int) -> Iterator[Record]:
            return _numbered(origin, data.select(range(first, len(data))), first)

        return [Shard([self._place.name, len(data)], partial(counted_rows, rows))]

    def _origin(self, saved: Mapping[str, Any], split: str) -> str:
        return self._place.name if len(saved) == 1 else f"{self._place.name}[{split}]"


def refuse_part(path: str, split: str | None) -> None:
    """Refuse a split expression such as train[:10%].

    Raises:
        UserError
    """
    if split is not None and not re.fullmatch(r"[\w.-]+", split):
        raise UserError(
            f"{path}, split {split!r}: a part of a split needs the split's number of rows, which a stream "
            "does not have",
            "name a whole split, and limit its rows with data.train[].limit",
        )


def _in_folder(place: DataPath) -> tuple[dict[str, Any] | None, dict[str, list[DataPath]], Mapping[str, int]]:
    """Return a folder's saved splits or None, its data files if not saved, and each split's row count."""
    saved = _saved(place)
    if saved is not None:
        return saved, {}, {name: len(data) for name, data in saved.items()}
    files = _data_files(place)
    return None, files, _Lengths(files)


def _numbered(origin: str, data: Any, first: int = 0) -> Iterator[Record]:
    number = first
    for table in data.with_format("arrow").iter(batch_size=BATCH):
        for row in rows_of(table):
            yield f"{origin}#{number}", row
            number += 1


def _saved(place: DataPath) -> dict[str, Any] | None:
    """Return the splits that save_to_disk wrote into a folder; None if it did not."""

    def has(name: str) -> bool:
        return bool(place.system.isfile(f"{place.path.rstrip('/')}/{name}"))

    try:
        if not (has("dataset_dict.json") or (has("state.json") and has("dataset_info.json"))):
            return None
        import datasets

        for file in Path(place.path).rglob("*") if place.local else ():
            check_ends(file, str(file))
        data = datasets.load_from_disk(place.path if place.local else place.name)
    except UserError:
        raise
    except Exception as error:
        explanation = explained(place.name, error)
        raise UserError(
            explanation.message, explanation.help or "write it again with save_to_disk"
        ) from error
    if isinstance(data, datasets.DatasetDict):
        return {str(name): part for name, part in data.items()}
    return {str(data.split or "train"): data}


def _data_files(place: DataPath) -> dict[str, list[DataPath]]:
    """Return the data files of a folder by split, following the hub's rules for file names."""
    from datasets.data_files import EmptyDatasetError, get_data_patterns, resolve_pattern

    base = glob.escape(place.path) if place.local else place.name
    splits: dict[str, list[DataPath]] = {}
    try:
        for split, patterns in get_data_patterns(base).items():
            paths: set[str] = set()
            for pattern in patterns:
                try:
                    paths.update(resolve_pattern(pattern, base))
                except FileNotFoundError:
                    continue
            files = [_below(place, place.system._strip_protocol(path)) for path in sorted(paths)]
            files = [file for file in files if kind_of(file.name) is not None]
            if files:
                splits[str(split)] = files
    except EmptyDatasetError:
        pass
    except Exception as error:
        raise explained(place.name, error) from error
    if not splits:
        raise UserError(
            f"the folder {place.name} holds no data set",
            f"give a folder that save_to_disk wrote, or one of data files: {ENDINGS}",
        )
    return splits


class _Lengths(Mapping[str, int]):
    """The number of rows of each split, counted on first use."""

    def __init__(self, files: Mapping[str, list[DataPath]]) -> None:
        self._files = files

    def __getitem__(self, split: str) -> int:
        return sum(DataFile(file).count() for file in self._files[split])

    def __contains__(self, split: object) -> bool:
        return split in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _parts(
    place: DataPath, split: str | None, lengths: Mapping[str, int]
) -> list[tuple[str, int, int | None]]:
    """Parse a split expression into (split, first row, end row; None for all)."""
    if split is None:
        split = "train" if len(lengths) > 1 else next(iter(lengths))
    if split in lengths:
        return [(split, 0, None)]
    import datasets

    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    except (ValueError, AssertionError) as error:
        raise UserError(
            f"{place.name} has no split {split!r}: {error}",
            f"it has {', '.join(lengths)}; a part of one is {next(iter(lengths))}[:10%]",
        ) from error
    return [(part.splitname, part.from_, part.to) for part in parts]


def _below(place: DataPath, path: str) -> DataPath:
    rest = path.removeprefix(place.path.rstrip("/")).lstrip("/")
    return DataPath(f"{place.name.rstrip('/')}/{rest}", place.system, path)
