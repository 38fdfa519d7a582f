"""Tests of merges of damaged bases and runs: each is refused by name, and nothing of it is written."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipec.runtime.errors import UserError
from recipec.runtime.merging import job as jobs
from recipec.runtime.merging import record
from recipec.runtime.weights.checkpoint import CONFIG, INDEX, HFCheckpoint
from tests.runtime.llama_bases import TINY, contents, flip, rewrite, write_base, write_sums
from tests.runtime.merge_faults.disks import Disk, Killed
from tests.runtime.merge_faults.merges import Place, Run, copy, interrupt, noted, times


def cached(base: Path, root: Path) -> Path:
    """Copy a base into Hugging Face's cache layout, and return its revision's folder."""
    snapshot = root / "snapshots" / "0f"
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    for path in base.iterdir():
        content = path.read_bytes()
        large = path.suffix == ".safetensors"
        name = (hashlib.sha256 if large else hashlib.sha1)(content).hexdigest()
        (root / "blobs" / name).write_bytes(content)
        (snapshot / path.name).symlink_to(f"../../blobs/{name}")
    return snapshot


def summed(base: Path, root: Path) -> Path:
    write_sums(copy(base, root))
    return root


@pytest.mark.parametrize("file", ["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"])
@pytest.mark.parametrize("made, knows", [(summed, "SHA256SUMS"), (cached, "Hugging Face's cache")])
def test_merge_refuses_base_file_that_differs_from_its_known_hash(
    made: Callable[[Path, Path], Path], knows: str, file: str, place: Place, run: Run, tmp_path: Path
) -> None:
    base = made(place.base, tmp_path / "base")
    assert run(tmp_path / "whole", base=base).status == 0
    flip(base / file, -5)
    target = tmp_path / "merged"
    run(target, base=base).refused(f"{base / file}: is not the file that its hash names", f"{knows} says")
    assert contents(target) == {}, "nothing is left of what was made of it"
    flip(base / file, -5)
    assert run(target, base=base).status == 0
    assert contents(target) == contents(tmp_path / "whole")


def test_resumed_merge_of_a_damaged_base_removes_its_output(
    place: Place, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill the cleanup at each step: nothing that was made from the damaged file counts as complete."""
    monkeypatch.setattr(record, "SAMPLE_BYTES", 0)  # the bases' sampled bytes do not show the damage
    base = summed(place.base, tmp_path / "base")
    assert run(tmp_path / "whole", base=base).status == 0
    file = base / "model-00001-of-00003.safetensors"
    tidied = 0
    for at in range(0, 40, 2):
        target = tmp_path / f"merged-{at}"
        flip(file, -5)
        with pytest.MonkeyPatch.context() as patched:
            # The first merge knew no hashes.
            patched.setattr(jobs, "known_hashes", lambda folder: {})
            interrupt(target, run, after=CONFIG, base=base)
        with pytest.MonkeyPatch.context() as patched:
            Disk(patched, at + 3)
            with contextlib.suppress(Killed):
                run(target, base=base).refused("is not the file that its hash names")
                assert contents(target) == {}
                break
        if noted(target):  # killed before it found the damage
            run(target, base=base).refused("is not the file that its hash names")
            assert contents(target) == {}
        else:
            tidied += 1
        flip(file, -5)
        assert run(target, base=base).status == 0
        assert contents(target) == contents(tmp_path / "whole"), at
    else:
        pytest.fail("the tidying up had no end")
    assert tidied > 2


def test_merge_resumes_after_a_base_read_error_and_keeps_complete_files(
    place: Place, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep what was written before a network error."""
    target, read = tmp_path / "merged", HFCheckpoint.bytes_of

    def fail(self: HFCheckpoint, *rest: Any) -> memoryview:
        if noted(target):
            raise UserError("gs://base: cannot be read: timed out", "run the same command again")
        return read(self, *rest)

    monkeypatch.setattr(HFCheckpoint, "bytes_of", fail)
    run(target).refused("timed out")
    kept, before = noted(target), times(target)
    assert kept
    monkeypatch.undo()
    assert run(target).status == 0
    place.expect(target)
    assert all(times(target)[name] == before[name] for name in kept)


def without_module(base: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite(shard_of(base, "layers.0.mlp.down_proj"), lambda arrays: arrays.__delitem__(name))
    change_index(base, lambda names: {key: file for key, file in names.items() if key != name})


def renamed(base: Path) -> None:
    def change(arrays: dict[str, np.ndarray]) -> None:
        for name in list(arrays):
            arrays[f"transformer.{name}"] = arrays.pop(name)

    for path in base.glob("*.safetensors"):
        rewrite(path, change)
    change_index(base, lambda names: {f"transformer.{key}": file for key, file in names.items()})


def shard_of(base: Path, module: str) -> Path:
    index = json.loads((base / INDEX).read_text())
    return base / str(index["weight_map"][f"model.{module}.weight"])


def change_index(base: Path, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    index = json.loads((base / INDEX).read_text())
    (base / INDEX).write_text(json.dumps(index | {"weight_map": change(index["weight_map"])}))


def configured(**changes: Any) -> Callable[[Path], None]:
    """Return a function that writes a base of other sizes."""

    def change(base: Path) -> None:
        shutil.rmtree(base)
        write_base(base, {**TINY, **changes})

    return change


@pytest.mark.parametrize(
    "damage, words",
    [
        (without_module, ["down_proj.weight is missing; config.json promises it with shape [16, 24]"]),
        (renamed, ["no text embedding among its", "not a checkpoint in Hugging Face's layout"]),
        (configured(intermediate_size=32), ["is 32; the run trained a model with 24", "--model"]),
        (configured(num_hidden_layers=3), ["layer_types is", "the run trained a model with", "--model"]),
        (
            configured(model_type="qwen3"),
            [
                "is of the family qwen3; the run trained one of llama",
                "base checkpoint of the run with --model",
            ],
        ),
    ],
    ids=lambda value: getattr(value, "__qualname__", "").removesuffix(".<locals>.change") or None,
)
def test_merge_refuses_incomplete_or_mismatched_base_before_writing(
    damage: Callable[[Path], None], words: list[str], place: Place, run: Run, tmp_path: Path
) -> None:
    base = copy(place.base, tmp_path / "base")
    damage(base)
    run(tmp_path / "merged", base=base).refused(*words)
    assert not list(tmp_path.glob("merged*")), "refused before anything is written"


def set_value(base: Path, module: str, value: float) -> None:
    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays[f"model.{module}.weight"].flat[-1] = value

    rewrite(shard_of(base, module), change)


@pytest.mark.parametrize("module", ["embed_tokens", "layers.0.self_attn.q_proj", "norm"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_merge_refuses_non_finite_base_values_and_names_the_tensor(
    module: str, value: float, quantization: str | None, place: Place, run: Run, tmp_path: Path
) -> None:
    base = copy(place.base, tmp_path / "base")
    set_value(base, module, value)
    said = f"{shard_of(base, module)}: model.{module}.weight holds values that are not finite"
    run(tmp_path / "merged", base=base, quantization=quantization).refused(said, "download the checkpoint")
    assert contents(tmp_path / "merged") == {}, "nothing is left of what was made of it"


def test_merge_refuses_merged_values_that_overflow_the_dtype(place: Place, run: Run, tmp_path: Path) -> None:
    base = copy(place.base, tmp_path / "base")
    module = "layers.0.mlp.down_proj"
    set_value(base, module, -1e6)
    run(tmp_path / "merged", base=base, dtype="float16").refused(
        f"model.{module}.weight: its merged values are not finite in float16", "set merge.dtype to float32"
    )
    assert contents(tmp_path / "merged") == {}
    assert run(tmp_path / "merged", base=base, dtype="float32").status == 0


@pytest.mark.parametrize("value, dtype, status", [(np.inf, "F64", 0), (np.nan, "F64", 1), (np.nan, "C64", 0)])
def test_merge_allows_infinite_input_max_and_reports_unchecked_dtypes(
    value: float, dtype: str, status: int, place: Place, run: Run, tmp_path: Path
) -> None:
    base, name = copy(place.base, tmp_path / "base"), "vision.input_max"
    path = shard_of(base, "norm")
    rewrite(path, lambda arrays: arrays.update({name: np.array(value)}))
    path.write_bytes(path.read_bytes().replace(b'"F64"', f'"{dtype}"'.encode()))
    change_index(base, lambda names: {**names, name: path.name})
    outcome = run(tmp_path / "merged", base=base)
    assert outcome.status == status, outcome
    assert (f"{name} holds values" in outcome.err) is (status == 1)
    assert (f"not checked for values that are not finite: {name} (C64)" in outcome.out) is (dtype == "C64")


def test_flipped_safetensors_header_bit_is_refused_or_harmless(place: Place, tmp_path: Path) -> None:
    """Flip each bit: the result is an error, or a header with the same meaning."""
    base = copy(place.base, tmp_path / "base")
    path = base / "model-00001-of-00003.safetensors"
    content, choose = path.read_bytes(), random.Random(0)
    header = HFCheckpoint.open(base).headers[path.name]
    refused = 0
    places = range(header.data_start)
    for at in places:
        damaged = bytearray(content)
        damaged[at] ^= 1 << choose.randrange(8)
        path.write_bytes(damaged)
        try:
            opened = HFCheckpoint.open(base)
            opened.verify()
        except UserError:
            refused += 1
        else:
            assert opened.headers[path.name].tensors == header.tensors, at
    assert refused > len(places) * 0.8
