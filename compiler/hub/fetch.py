"""Fetch from the Hugging Face hub what a compile needs of a model: small files, and a list of all tensors.

Weights are not downloaded: of each safetensors file, a range request reads only the header. All requests go
through huggingface_hub, which respects HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, proxies and the hub's own
cache.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from recipec.compiler import __version__, catalog
from recipec.compiler.artifacts.whole import changing
from recipec.compiler.catalog import E0802, added
from recipec.compiler.catalog.added import LOCK, MAX_FILE, TENSORS
from recipec.compiler.errors import ArtifactError
from recipec.compiler.hub.hub_errors import HubNotReached, refused
from recipec.compiler.json_value import json_value
from recipec.compiler.packages import install, missing_packages
from recipec.compiler.pages.numbers import gb_number
from recipec.compiler.terminal import log
from recipec.compiler.wording import plural
from recipec.compiler.writing import cannot_be_written
from recipec.runtime.model.families import UnsupportedCheckpoint
from recipec.runtime.weights.headers import Tensor, misplaced, tensors_of

CONFIG, GENERATION = "config.json", "generation_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

SMALL = (
    *(CONFIG, GENERATION, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja", "additional_chat_templates/*.jinja"),
)
"""Files that are fetched from a repository, for compiling, previewing and rehearsing."""
WITHOUT_FAST = ("tokenizer.model", "vocab.json", "merges.txt")
"""Files fetched if there is no tokenizer.json; the fast tokenizer is built from them."""

AT_A_TIME = 8
"""Number of headers requested in parallel."""
TRIES = 3


@dataclass(frozen=True)
class Fetched:
    """A model's files from the hub.

    Attributes:
        revision: the requested revision, None for the main branch.
        name: the hub's own id of the model; differs from `id` if it was renamed.
        files: contents by name, including TENSORS.
        tensors: all tensors of the checkpoint.
    """

    id: str
    revision: str | None
    commit: str
    name: str
    files: Mapping[str, bytes]
    tensors: Mapping[str, Tensor] = field(repr=False)

    def __str__(self) -> str:
        shards = len({tensor.file for tensor in self.tensors.values()})
        size = sum(tensor.end - tensor.start for tensor in self.tensors.values())
        brought = f"{self.id} at commit {self.commit}, {plural(len(self.files), 'file')}"
        of = f"of {plural(shards, 'file')} with {gb_number(size, 1)} GB"
        return f"{brought}; {plural(len(self.tensors), 'tensor')} {of} listed"


def fetch(model_id: str, revision: str | None = None) -> Fetched:
    """Fetch a model's small files and the list of its tensors into memory.

    Args:
        revision: a branch, tag or commit; None for the main branch.

    Raises:
        HubNotReached: when the hub cannot be reached.
        ArtifactError: when the hub has no such model or restricts access to it, the checkpoint cannot be
            trained, or the received data differs from what the hub announced.
    """
    if missing_packages(["huggingface_hub"]):
        raise HubNotReached(model_id, "huggingface_hub, which asks the hub, is not installed", install("hub"))
    return _Repository(model_id, revision).fetched()


class _Repository:
    """A model on the hub, at one commit."""

    def __init__(self, model_id: str, revision: str | None) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT as patience
        from huggingface_hub.utils import disable_progress_bars, logging

        logging.set_verbosity_error()
        disable_progress_bars()
        self._id, self._revision = model_id, revision
        self._api = HfApi(library_name="recipec", library_version=__version__)
        with refused(model_id, revision):
            info = self._api.model_info(model_id, revision=revision, files_metadata=True, timeout=patience)
            self._sizes = {str(sibling.rfilename): sibling.size for sibling in info.siblings or ()}
            self._commit, self._name = str(info.sha), str(info.id)
        if not re.fullmatch(r"[0-9a-f]{40}", self._commit):
            self._wrong("the hub gives no commit of it")

    def fetched(self) -> Fetched:
        files = {CONFIG: self._config()}
        names = [*SMALL, *(() if "tokenizer.json" in self._sizes else WITHOUT_FAST)]
        for file in sorted(self._sizes):
            if file not in files and any(_is(file, name) for name in names):
                files[file] = self._file(file)
        files[TENSORS] = added.tensors_text(self._tensors)
        return Fetched(self._id, self._revision, self._commit, self._name, files, self._tensors)

    def _config(self) -> bytes:
        """Return config.json, after checking that the model can be trained."""
        if CONFIG not in self._sizes:
            other = next(
                (why for name, why in INSTEAD.items() if any(_is(file, name) for file in self._sizes)), None
            )
            self._wrong(f"it has no {CONFIG}", other)
        content = self._file(CONFIG)
        config = json_value(content)
        try:
            catalog.of_hub(self._id, config, CONFIG, self._shapes)
        except catalog.UnknownModel as error:
            if error.code == E0802:
                self._wrong(str(error))
            raise ArtifactError(str(error), error.help) from None
        except UnsupportedCheckpoint as error:
            raise ArtifactError(
                f"`{self._id}` cannot be trained by this version: {error}",
                "`recipe models` lists the models that can be trained; nothing was added",
            ) from None
        return content

    def _file(self, name: str) -> bytes:
        """Return a small file, through the hub's cache."""
        size = self._sizes[name]
        if size is not None and size > MAX_FILE:
            self._wrong(f"{name} has {size:,} bytes, more than the {MAX_FILE:,} of any such file")
        log.info("%s", name)
        with refused(self._id, self._revision):
            path = self._api.hf_hub_download(self._id, name, revision=self._commit)
            content = Path(path).read_bytes()
        if size is not None and len(content) != size:
            self._wrong(f"{name} came with {len(content):,} bytes of {size:,}", "try again")
        return content

    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the checkpoint."""
        if SINGLE in self._sizes:
            self._demand_ranges(SINGLE)
            return self._header(SINGLE)
        if INDEX not in self._sizes:
            self._wrong(f"it has neither {SINGLE} nor {INDEX}", "weights are read only from safetensors")
        weight_map = self._weight_map()
        shards = sorted(set(weight_map.values()))
        absent = [shard for shard in shards if shard not in self._sizes]
        if absent:
            self._wrong(
                f"{INDEX} names {absent[0]}, which does not exist", "another revision may be complete"
            )
        self._demand_ranges(shards[0])
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            headers = [*pool.map(self._header, shards)]
        tensors: dict[str, Tensor] = {}
        for header in headers:
            for name, tensor in header.items():
                if name in tensors:
                    self._wrong(f"{name} is in both {tensors[name].file} and {tensor.file}")
                tensors[name] = tensor
        for name, shard in sorted(weight_map.items()):
            if name not in tensors or tensors[name].file != shard:
                self._wrong(f"{INDEX} names {name} in {shard}, which does not contain it")
        return tensors

    def _demand_ranges(self, shard: str) -> None:
        """Refuse a hub or proxy that ignores range requests: whole files have many GB."""
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT as patience
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        url = hf_hub_url(self._id, shard, revision=self._commit)
        headers = {**build_hf_headers(), "range": "bytes=0-7"}
        with (
            refused(self._id, self._revision),
            get_session().stream("GET", url, headers=headers, timeout=patience) as answer,
        ):
            hf_raise_for_status(answer)
            if answer.status_code != 206 and self._sizes[shard] != 0:
                self._wrong(
                    f"a part of {shard} was requested, but the whole file was sent",
                    "a proxy may remove the range from the request: try another network, or HF_ENDPOINT",
                )

    def _weight_map(self) -> dict[str, str]:
        index = json_value(self._file(INDEX))
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            self._wrong(f"{INDEX} has no weight_map")
        if not all(isinstance(file, str) and "/" not in file for file in weight_map.values()):
            self._wrong(f"{INDEX} names a file that is not one of the repository's folder")
        return weight_map

    def _header(self, shard: str) -> dict[str, Tensor]:
        """Return the tensors of a safetensors file, from its header alone."""
        log.info("the header of %s", shard)
        with refused(self._id, self._revision):
            fields = self._parsed(shard)
        try:
            tensors = tensors_of(fields, shard, 0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._wrong(f"the header of {shard} is not that of a safetensors file ({error})")
        end = max((tensor.end for tensor in tensors.values()), default=0)
        size = self._sizes[shard]
        wrong = misplaced(tensors, 0, end)
        if wrong is None and size is not None and 8 + end > size:
            wrong = f"it has {size:,} bytes, and its tensors {end:,}"
        if wrong is not None:
            self._wrong(f"{shard}: {wrong}")
        return tensors

    def _parsed(self, shard: str) -> dict[str, Any]:
        """Return a header's fields; retry if the connection breaks."""
        import httpx
        from huggingface_hub.errors import SafetensorsParsingError

        for attempt in range(1, TRIES + 1):
            try:
                parsed = self._api.parse_safetensors_file_metadata(self._id, shard, revision=self._commit)
                return {
                    name: {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": tensor.data_offsets}
                    for name, tensor in parsed.tensors.items()
                }
            except (SafetensorsParsingError, ValueError, TypeError, AttributeError, RecursionError) as error:
                self._wrong(f"the header of {shard} is not that of a safetensors file", cause=error)
            except httpx.TransportError:
                if attempt == TRIES:
                    raise
                time.sleep(attempt)
        raise AssertionError

    def _wrong(self, why: str, help: str | None = None, cause: Exception | None = None) -> NoReturn:
        message = f"`{self._id}` at commit {self._commit}: {why}"
        raise ArtifactError(message, help or "another revision, or another checkpoint") from cause


INSTEAD = {
    "adapter_config.json": "it is an adapter: name the model that it was trained on",
    "*.gguf": "GGUF is a format of inference: name the model that it was made from",
    "model_index.json": "it is a pipeline that makes images, not a language model",
}
"""Descriptions of repositories without a config.json, by a file that they contain."""


def _is(file: str, pattern: str) -> bool:
    return fnmatchcase(file, pattern) and file.count("/") == pattern.count("/")


def write(fetched: Fetched, models: Path) -> Path:
    """Write a model's folder into `models`, replacing the files of an earlier commit, and return it.

    Raises:
        ArtifactError: when a folder of this name was not written by recipec, or writing fails.
    """
    name = added.folder_name(fetched.id)
    target = models / name
    try:
        models.mkdir(parents=True, exist_ok=True)
        with changing(models) as change:
            before = _files_of(target, fetched.id)
            for file, content in fetched.files.items():
                change.write(f"{name}/{file}", content)
            for file in before - fetched.files.keys():
                if (target / file).is_file():
                    change.remove(f"{name}/{file}")
            lock = added.lock_text(fetched.id, fetched.revision, fetched.commit, fetched.files)
            change.write(f"{name}/{LOCK}", lock)  # last: it marks the folder complete
    except OSError as error:
        raise cannot_be_written(target, error) from error
    return target


def _files_of(target: Path, model_id: str) -> set[str]:
    """Return the files that an earlier command wrote."""
    earlier = None
    with suppress(added.NotWhole):
        earlier = added.added_at(target, model_id, str(target))
    if earlier is None and not (target / LOCK).exists() and target.exists() and any(os.scandir(target)):
        raise ArtifactError(
            f"{target} exists, and `recipe models add` did not write it",
            "move it, or choose another with -o",
        )
    return set(earlier.files) if earlier else set()
