"""Tests of merging: its arithmetic, its output folder, and its errors."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from recipec.runtime.checkpoints.record import check_record
from recipec.runtime.checkpoints.saved_steps import choose_step, saved_steps, step_losses
from recipec.runtime.checkpoints.trained_weights import check_model, load_trained
from recipec.runtime.merging import merge
from recipec.runtime.merging.file_plan import shard_bytes
from recipec.runtime.merging.job import checkpoint_digest
from recipec.runtime.merging.tokenizer_files import own_files
from recipec.runtime.settings import ModelSettings
from recipec.runtime.weights.checkpoint import INDEX, HFCheckpoint
from tests import tiny
from tests.refusals import message
from tests.runtime.runs import lora_section, save_run, write_lock, write_merged
from tests.vision_checkpoints import make_gemma3, publish

MODEL = ModelSettings(id="./base", family="gemma4")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> HFCheckpoint:
    """Make a multimodal Gemma 4 in several files, with side files."""
    folder = tmp_path_factory.mktemp("base")
    kinds = ["sliding_attention", "full_attention"]
    tiny.make_gemma4(folder, shards=3, num_hidden_layers=2, layer_types=kinds)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "the base\'s", "eos_token": "\u00e9"}')
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("tools")
    (folder / ".cache").mkdir()
    (folder / "other.gguf").write_bytes(b"weights in another format")
    return HFCheckpoint.open(folder)


@pytest.fixture(scope="module")
def trained(base: HFCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run with two checkpoints."""
    folder = tmp_path_factory.mktemp("run")
    save_run(folder, base, lora_section(), steps=(2, 10))
    return folder


@pytest.fixture(scope="module")
def merged(base: HFCheckpoint, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Merge the run once, in float32, with its adapter, in the base's files."""
    folder = tmp_path_factory.mktemp("work")
    assert run_merge(base, trained, folder) == 0
    return folder


def run_merge(base: HFCheckpoint, run: Path, work: Path, *argv: str, **settings: Any) -> int:
    values = {"checkpoint": str(run), "output": "merged", "dtype": "float32", "adapter": True}
    values |= {"max_shard_size": "base", **settings}
    return merge.main(
        work, MODEL, argv=["--model", str(base.directory), "--output", str(work), *argv], **values
    )


def test_merge_changes_only_adapted_tensors(base: HFCheckpoint, trained: Path, merged: Path) -> None:
    out = HFCheckpoint.open(merged / "merged")
    out.verify()
    adapters = load_trained(trained, "latest", base)
    deltas = adapters.changes(base)
    assert len(deltas) == 13, "7 per layer, and no v_proj in the global one"
    assert out.files == base.files
    for file in base.files:
        assert out.headers[file].raw == base.headers[file].raw, "names, order, types and metadata"
    for name in base.tensors:
        before, after = base.read(name), out.read(name)
        if name in deltas:
            delta = deltas[name]
            exact = before + delta.scale * (delta.b.astype(np.float64) @ delta.a)
            np.testing.assert_allclose(after, exact, rtol=1e-5, atol=1e-6)
            assert np.abs(after - before).max() > 1e-2
        else:
            assert base.bytes_of(name) == out.bytes_of(name)
    for name in {INDEX, *base.side_files}:
        assert (out.directory / name).read_bytes() == (base.directory / name).read_bytes()
    extra = {path.name for path in out.directory.iterdir()} - {p.name for p in base.directory.iterdir()}
    assert extra == {"merge.json", "recipe.lock.json", "README.md"}
    assert (out.directory / "recipe.lock.json").read_bytes() == (trained / "recipe.lock.json").read_bytes()
    record = json.loads((out.directory / "merge.json").read_text())
    assert (record["checkpoint"]["step"], record["lora"]["rank"], record["lora"]["alpha"]) == (10, 3, 6.0)
    assert record["tensors"] == {"merged": 13, "kept": len(base.tensors) - 13, "quantized": 0}
    written = {str(path.relative_to(out.directory)) for path in out.directory.rglob("*") if path.is_file()}
    assert written > {"additional_chat_templates/tools.jinja"}
    assert record["files"].keys() == written - {"merge.json"}
    for name, entry in record["files"].items():
        content = (out.directory / name).read_bytes()
        assert entry == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert sorted(path.name for path in merged.iterdir()) == ["merged", "merged-adapter"]


def test_merged_model_with_a_tower_keeps_the_published_names(tmp_path: Path) -> None:
    """A server knows the tower's tensors by the names on the hub, which differ from those that transformers
    saves."""
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    make_gemma3(tmp_path / "base", **layers)
    publish(tmp_path / "base")
    base = HFCheckpoint.open(tmp_path / "base")
    save_run(tmp_path / "run", base, lora_section())
    values = {"checkpoint": str(tmp_path / "run"), "output": "merged", "dtype": "float32"}
    argv = ["--model", str(tmp_path / "base"), "--output", str(tmp_path)]
    assert merge.main(tmp_path, ModelSettings(id="./base", family="gemma3"), argv=argv, **values) == 0
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("base", "merged"))
    assert set(after) == set(before)
    changed = {name for name, value in after.items() if not np.array_equal(value, before[name])}
    assert len(changed) == 14 and all(name.startswith("language_model.model.layers.") for name in changed)
    tower = [name for name in after if name.startswith("vision_tower.vision_model.")]
    assert tower and any(name.startswith("multi_modal_projector.") for name in after)


@pytest.mark.parametrize("size", ["100KB", "5GB"])
def test_shards_respect_max_shard_size_and_keep_tensors(
    base: HFCheckpoint, trained: Path, merged: Path, tmp_path: Path, size: str
) -> None:
    assert run_merge(base, trained, tmp_path, max_shard_size=size, adapter=False) == 0
    assert not (tmp_path / "merged-adapter").exists()
    out, same = HFCheckpoint.open(tmp_path / "merged"), HFCheckpoint.open(merged / "merged")
    out.verify()
    assert list(out.tensors) == list(base.tensors), "in the base's order"
    assert all(out.bytes_of(name) == same.bytes_of(name) for name in base.tensors)
    limit = shard_bytes(size)
    assert all(
        sum(t.end - t.start for t in header.tensors.values()) <= limit or len(header.tensors) == 1
        for header in out.headers.values()
    )
    if size == "5GB":
        assert out.files == ("model.safetensors",) and not (out.directory / INDEX).exists()
        return
    count = len(out.files)
    assert count > 1 and out.files[0] == f"model-00001-of-{count:05d}.safetensors"
    index = json.loads((out.directory / INDEX).read_text())
    assert index["weight_map"] == {name: tensor.file for name, tensor in out.tensors.items()}
    assert index["metadata"]["total_size"] == sum(t.end - t.start for t in out.tensors.values())
    for file in out.files:
        with safe_open(out.directory / file, "numpy") as reference:
            assert reference.metadata() == {"format": "pt"}


@pytest.mark.parametrize(("environment", "platforms"), [(None, "cpu"), ("tpu", None)])
def test_a_merge_occupies_no_tpu(
    base: HFCheckpoint,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: str | None,
    platforms: str | None,
) -> None:
    before = jax.config.jax_platforms
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if environment is not None:
        monkeypatch.setenv("JAX_PLATFORMS", environment)
    try:
        jax.config.update("jax_platforms", None)
        assert run_merge(base, trained, tmp_path, "--dry-run") == 0
        assert jax.config.jax_platforms == platforms
    finally:
        jax.config.update("jax_platforms", before)


def test_a_dry_run_writes_nothing(
    base: HFCheckpoint, trained: Path, merged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_merge(base, trained, tmp_path, "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["base", "trained", "output", "adapter", "disk"]
    assert f"{len(base.files)} files, {len(base.tensors)} tensors" in lines[0]
    assert "13 tensors changed by training" in lines[2]
    assert list(tmp_path.iterdir()) == []
    adapter = (merged / "merged-adapter" / "adapter_model.safetensors").stat().st_size
    assert lines[3].endswith(f"merged-adapter: {adapter / 1e6:.1f}MB")
    files = list((merged / "merged").glob("*.safetensors"))
    assert f"merged: {sum(file.stat().st_size for file in files) / 1e6:.1f}MB, {len(files)} files" in lines[2]


def test_merge_at_addresses_writes_same_bytes_as_local_merge(
    base: HFCheckpoint, trained: Path, merged: Path, tmp_path: Path
) -> None:
    """Merge a base at an address of fsspec into another: the output equals a local merge byte for byte."""
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(base.directory), "/merging/base", recursive=True)
    values = {"dtype": "float32", "adapter": True, "max_shard_size": "base", "output": "merged"}
    arguments = ["--model", "memory://merging/base", "--output", "memory://merging/out"]
    try:
        assert merge.main(tmp_path, MODEL, argv=arguments, checkpoint=str(trained), **values) == 0
        written = {
            f"/merging/out/{path.relative_to(merged)}": path.read_bytes()
            for path in merged.rglob("*")
            if path.is_file()
        }
        assert {name: memory.cat(name) for name in memory.find("/merging/out")} == written
    finally:
        memory.rm("/merging", recursive=True)


def test_training_chat_template_replaces_base_template(
    base: HFCheckpoint, trained: Path, tmp_path: Path
) -> None:
    assert run_merge(base, trained, tmp_path, chat_template="{{ 'trained' }}") == 0
    assert (tmp_path / "merged" / "chat_template.jinja").read_text() == "{{ 'trained' }}"
    assert json.loads((tmp_path / "merged" / "tokenizer_config.json").read_text()) == {"eos_token": "\u00e9"}
    # Read it as llama.cpp's converter does, which would prefer a template in tokenizer_config.json.
    assert gguf.SpecialVocab(tmp_path / "merged").chat_template == "{{ 'trained' }}"
    assert not (tmp_path / "merged" / "additional_chat_templates").exists()
    assert (tmp_path / "merged-adapter" / "chat_template.jinja").read_text() == "{{ 'trained' }}"


def test_run_with_another_tokenizer_is_merged_with_that_tokenizer(
    base: HFCheckpoint, trained: Path, tmp_path: Path
) -> None:
    own = {"tokenizer.json": '{"own": 1}', "chat_template.jinja": "own", "vocab.txt": "own"}
    run, artifact = tmp_path / "run", tmp_path / "artifact"
    shutil.copytree(trained, run)
    record = json.loads((run / "recipe.lock.json").read_text())
    record["recipe"]["model"] = {"tokenizer": "./own"}
    (run / "recipe.lock.json").write_text(json.dumps(record))
    assert "cannot be downloaded" in message(lambda: own_files("./own", None, artifact))
    (artifact / "own").mkdir(parents=True)
    for name, text in {**own, "unrelated.txt": ""}.items():
        (artifact / "own" / name).write_text(text)
    assert run_merge(base, run, artifact) == 0
    for folder, others in (("merged", {"config.json"}), ("merged-adapter", {"adapter_config.json"})):
        found = {path.name: path for path in (artifact / folder).rglob("*") if path.is_file()}
        assert {name: found[name].read_text() for name in own} == own
        assert found.keys() > others and not found.keys() & {"tokenizer_config.json", "tools.jinja"}
        listed = json.loads(found["merge.json"].read_text())["files"]
        assert listed.keys() == found.keys() - {"merge.json"}
    both = own_files("./own", "{{ 'trained' }}", artifact)
    assert both["chat_template.jinja"] == b"{{ 'trained' }}" and both["vocab.txt"] == b"own"


def test_merge_dtype_applies_only_to_adapted_tensors(
    base: HFCheckpoint, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_merge(base, trained, tmp_path, dtype="bfloat16", adapter=False) == 0
    said = capsys.readouterr().out
    assert "13 merged tensors are bfloat16; the base has them as float32" in said
    assert f"merged: {tmp_path / 'merged'} step=10 tensors=13 kept=" in said
    out = HFCheckpoint.open(tmp_path / "merged")
    out.verify()
    changed = {name for name in base.tensors if out.tensors[name].dtype != base.tensors[name].dtype}
    assert len(changed) == 13 and {out.tensors[name].dtype for name in changed} == {"BF16"}
    total = json.loads((out.directory / INDEX).read_text())["metadata"]["total_size"]
    assert total == sum(tensor.end - tensor.start for tensor in out.tensors.values())
    for file in out.files:
        with safe_open(out.directory / file, "numpy") as reference:
            assert reference.metadata() == base.headers[file].metadata
            for name in reference.keys():  # noqa: SIM118
                np.testing.assert_array_equal(reference.get_tensor(name), out.read(name))


@pytest.mark.parametrize(
    "section",
    [
        {"targets": ["k_proj", "v_proj"], "layers": [0], "kv": "shared"},
        {
            "rank": 1,
            "alpha": 0.5,
            "targets": [r"layers\.[05]\.self_attn\.q_proj", "up_proj"],
            "dtype": "bfloat16",
        },
    ],
    ids=lambda section: "-".join(section),
)
def test_merge_changes_only_selected_projections_and_layers(
    base: HFCheckpoint, section: dict[str, Any], tmp_path: Path
) -> None:
    full = lora_section(**section)
    adapters = save_run(tmp_path / "run", base, full)
    run = load_trained(tmp_path / "run", "4", base)
    assert run.deltas().keys() == {adapter.name for adapter in adapters}
    assert {delta.scale for delta in run.deltas().values()} == {full["alpha"] / full["rank"]}
    plan = write_merged(base, run.changes(base), tmp_path / "out")
    out = HFCheckpoint.open(tmp_path / "out")
    changed = {name for name in base.tensors if base.bytes_of(name) != out.bytes_of(name)}
    assert changed == {f"{base.prefix}{name}.weight" for name in run.deltas()}
    assert plan.merged == len(changed) and plan.copied == len(base.tensors) - len(changed)


def test_choose_step_accepts_only_complete_existing_steps(
    base: HFCheckpoint, trained: Path, tmp_path: Path
) -> None:
    (trained / "12.orbax-checkpoint-tmp-1").mkdir()
    (trained / "13").mkdir()
    (trained / "²").mkdir()  # str.isdigit() accepts it, int() does not
    assert saved_steps(trained) == [2, 10]
    assert choose_step(trained, "latest") == 10
    assert choose_step(trained, "2") == 2
    assert "no checkpoint of step 3" in message(lambda: choose_step(trained, "3"))
    for word in ("last", "²"):
        assert "is neither latest, best nor a number" in message(lambda word=word: choose_step(trained, word))
    assert "no evaluation loss" in message(lambda: choose_step(trained, "best"))
    assert "no checkpoint" in message(lambda: choose_step(tmp_path, "latest"))
    first, last = load_trained(trained, "2", base), load_trained(trained, "latest", base)
    weight = first.adapters[0].target.weight
    assert not np.array_equal(first.arrays[weight][0], last.arrays[weight][0])


def test_best_step_is_kept_step_with_lowest_eval_loss(base: HFCheckpoint, tmp_path: Path) -> None:
    save_run(tmp_path, base, lora_section(targets=["q_proj"]), steps=(2, 4, 6))
    rows = [(1, None), (2, 3.0), (3, 1.0), (4, 2.5), (6, 2.75)]
    lines = [json.dumps({"step": step, "loss": 1.0}) for step, _ in rows]
    lines += [json.dumps({"step": step, "eval_loss": loss}) for step, loss in rows if loss]
    lines += ['{"step": 2, "eval_loss": "NaN"}']  # as the loggers write it
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 6, "eval_l']))
    assert load_trained(tmp_path, "best", base).step == 4
    assert math.isnan(step_losses(tmp_path, 2)["eval_loss"])


def test_modules_trained_whole_count_for_identity(base: HFCheckpoint, tmp_path: Path) -> None:
    save_run(tmp_path, base, lora_section(targets=["q_proj"], modules_to_save=["embed_tokens"]))
    run = load_trained(tmp_path, "4", base)
    other = replace(run, whole={path: array + 1 for path, array in run.whole.items()})
    assert run.whole and not list(tmp_path.rglob("SHA256SUMS"))
    assert checkpoint_digest(str(tmp_path), run) != checkpoint_digest(str(tmp_path), other)


def test_run_of_version_0_2_names_the_version_to_finish_with(base: HFCheckpoint, tmp_path: Path) -> None:
    """Its arrays of Gemma have other names: neither merge.py nor --resume reads them."""
    lock = {"recipe": {}, "model": {"family": "gemma4", "architecture": {"global_theta": 1_000_000}}}
    (tmp_path / "recipe.lock.json").write_text(json.dumps(lock))
    for read in (lambda: check_model(lock, base), lambda: check_record(tmp_path, tmp_path)):
        assert "holds a run of version 0.2, which gave Gemma's arrays other names" in message(read)
    assert "its places is" in message(
        lambda: check_model({"model": {"family": "gemma4", "architecture": {"places": {}}}}, base)
    )


def test_record_that_does_not_match_arrays_is_refused(
    base: HFCheckpoint, trained: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    for section, words in (
        (lora_section(rank=4), "has shape"),
        (lora_section(targets=["q_proj"]), "does not list"),
        (lora_section(kv="shared"), "does not list"),
        (None, "no embedder.input_embedding"),
        ({"rank": 3}, "is incomplete"),
    ):
        write_lock(run, base, section)
        assert words in message(lambda: load_trained(run, "latest", base))
    write_lock(run, base, lora_section())
    shutil.rmtree(run / "10" / "model_params" / "d", ignore_errors=True)
    shutil.rmtree(run / "10" / "model_params" / "ocdbt.process_0", ignore_errors=True)
    assert "cannot be read" in message(lambda: load_trained(run, "latest", base))
    (run / "recipe.lock.json").unlink()
    assert "recipe.lock.json" in message(lambda: load_trained(run, "latest", base))


def test_non_finite_adapter_values_are_refused(base: HFCheckpoint, tmp_path: Path) -> None:
    save_run(tmp_path, base, lora_section(targets=["q_proj"]), scale=np.inf)
    assert "not finite" in message(lambda: load_trained(tmp_path, "latest", base))
