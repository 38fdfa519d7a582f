"""Tests of adapters in their various formats: each is read correctly, and every change is reported."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipec.runtime.checkpoints import manifest, resuming, trained_weights
from recipec.runtime.checkpoints.trained_weights import TrainedAdapters, load_trained, restore_tree
from recipec.runtime.errors import UserError
from recipec.runtime.peft.importing import import_adapter
from tests.runtime.peft_import.adapters import (
    Small,
    arrays_of,
    assert_same,
    rename,
    set_config,
    write_tensors,
)
from tests.runtime.runs import save_run, write_lock


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"kv": "shared", "modules_to_save": ["embed_tokens", "q_norm"]},
        {"trainable_tokens": [7, 3]},
    ],
    ids=str,
)
def test_exported_adapter_is_imported_bit_for_bit(
    small: Small, tmp_path: Path, changes: dict[str, Any]
) -> None:
    section = {**small.section, **changes}
    save_run(tmp_path / "run", small.base, section)
    trained = load_trained(tmp_path / "run", "latest", small.base)
    assert isinstance(trained, TrainedAdapters)
    small.export(trained, tmp_path / "adapter")
    write_lock(tmp_path / "artifact", small.base, section)
    import_adapter(tmp_path / "adapter", small.base, tmp_path / "artifact", tmp_path / "imported")
    # `save_run` masks some values to minus zero. Values that training never touches are zero.
    expected = {path: array + 0 for path, array in restore_tree(str(tmp_path / "run/4/model_params")).items()}
    assert_same(expected, restore_tree(str(tmp_path / "imported/0/model_params")))
    lock = "recipe.lock.json"
    assert (tmp_path / "imported" / lock).read_bytes() == (tmp_path / "artifact" / lock).read_bytes()


def test_half_precision_adapter_is_imported_as_exact_float32(
    small: Small, copy: Path, tmp_path: Path
) -> None:
    arrays = {name: array.astype("bfloat16") for name, array in arrays_of(copy).items()}
    write_tensors(copy, arrays)
    import_adapter(copy, small.base, small.artifact, tmp_path / "imported")
    trained = load_trained(tmp_path / "imported", "0", small.base)
    assert isinstance(trained, TrainedAdapters)
    for name, delta in trained.deltas().items():
        expected = arrays[f"base_model.model.model.{name}.lora_B.weight"]
        assert delta.b.dtype == np.float32 and np.array_equal(delta.b, expected.astype(np.float32))


def test_import_reports_dropout_base_model_and_revision_differences(
    small: Small, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lock(tmp_path / "artifact", small.base, {**small.section, "dropout": 0.1})
    import_adapter(small.adapter, small.base, tmp_path / "artifact", tmp_path / "imported")
    out = capsys.readouterr().out
    assert "note: the adapter was trained with dropout 0; the recipe's is 0.1\n" in out
    assert "note: the adapter was trained on some/gemma; the recipe's model is tiny\n" in out
    set_config(revision="abc")(copy)
    lock = tmp_path / "artifact" / "recipe.lock.json"
    record = json.loads(lock.read_text())
    record["recipe"]["model"] = {"id": "some/gemma", "revision": "def"}
    lock.write_text(json.dumps(record))
    import_adapter(copy, small.base, tmp_path / "artifact", tmp_path / "again")
    out = capsys.readouterr().out
    assert "note: the adapter was trained on revision abc of the model; the recipe's is def\n" in out


@pytest.mark.parametrize(
    ("old", "new"),
    [(".weight", ".default.weight"), (".model.model.layers", ".model.language_model.model.layers")],
)
def test_import_reads_tensor_names_of_other_layouts_and_versions(
    small: Small, copy: Path, tmp_path: Path, old: str, new: str
) -> None:
    rename(old, new)(copy)
    assert not arrays_of(copy).keys() & arrays_of(small.adapter).keys()
    import_adapter(copy, small.base, small.artifact, tmp_path / "imported")
    found = load_trained(tmp_path / "imported", "latest", small.base)
    assert isinstance(found, TrainedAdapters) and isinstance(small.trained, TrainedAdapters)
    for name, delta in small.trained.deltas().items():
        assert np.array_equal(found.deltas()[name].a, delta.a) and np.array_equal(
            found.deltas()[name].b, delta.b
        )


def test_import_reads_adapter_from_a_remote_address(small: Small, tmp_path: Path) -> None:
    import fsspec

    system = fsspec.filesystem("memory")
    system.put(str(small.adapter), "/adapters/one", recursive=True)
    import_adapter("memory://adapters/one", small.base, small.artifact, tmp_path / "imported")
    found = resuming.find(str(tmp_path / "imported"))
    assert found.step == 0 and found.imported is not None
    assert found.imported["adapter"] == "memory://adapters/one"
    assert "no such folder" in small.fail("memory://adapters/two", tmp_path / "other")


def test_import_refuses_run_directory_with_checkpoints(small: Small, tmp_path: Path) -> None:
    save_run(tmp_path / "run", small.base, small.section)
    with pytest.raises(UserError, match="already holds checkpoints, the newest of step 4"):
        import_adapter(small.adapter, small.base, small.artifact, tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["4", "recipe.lock.json"]


def test_import_to_a_full_disk_leaves_no_step(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(manifest, "write", fail)
        with pytest.raises(UserError, match="the adapters could not be written: No space left on device"):
            import_adapter(small.adapter, small.base, small.artifact, tmp_path / "run")
    assert trained_weights.step_folders(tmp_path / "run") == []
    import_adapter(small.adapter, small.base, small.artifact, tmp_path / "run")
    assert resuming.find(str(tmp_path / "run")).step == 0


def forget(step: Path) -> None:
    metadata = json.loads((step / "_CHECKPOINT_METADATA").read_text())
    metadata["custom_metadata"]["imported"]["adapter"] = "another"
    (step / "_CHECKPOINT_METADATA").write_text(json.dumps(metadata))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (forget, "_CHECKPOINT_METADATA is damaged"),
        (lambda step: (step / "_CHECKPOINT_METADATA").unlink(), "optimizer_state is missing"),
        (lambda step: step.rename(step.with_name("1")), "optimizer_state is missing"),
    ],
)
def test_resume_refuses_damaged_imported_step_and_names_the_damage(
    small: Small, tmp_path: Path, damage: Callable[[Path], Any], reason: str
) -> None:
    import_adapter(small.adapter, small.base, small.artifact, tmp_path / "run")
    damage(tmp_path / "run" / "0")
    with pytest.raises(UserError, match=f"none of its checkpoints is complete: step [01]: {reason}"):
        resuming.find(str(tmp_path / "run"))
