"""Tests of a stranger's checkpoint: its files are only data, and its claims are checked."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest

from recipec.compiler.errors import ArtifactError
from recipec.compiler.parity.compare import read_trace
from recipec.compiler.trained.chat import Options, Talk
from recipec.runtime.backends.peft_model import load_model
from recipec.runtime.checkpoints import trained_weights
from recipec.runtime.checkpoints.trained_weights import recorded_lora
from recipec.runtime.data.tokenizer import load_tokenizer
from recipec.runtime.errors import UserError
from recipec.runtime.model.adapters import Adapter, lora_settings
from recipec.runtime.model.families import FAMILIES
from recipec.runtime.peft.adapter import open_adapter
from recipec.runtime.settings import DataSettings, ModelSettings
from recipec.runtime.weights.checkpoint import CONFIG, INDEX, SINGLE, HFCheckpoint
from recipec.runtime.weights.files import Files
from recipec.runtime.weights.headers import read_header
from tests.runtime.llama_bases import TINY

ENTRY: dict[str, Any] = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def header(fields: Any, data: bytes = b"1234", length: int | None = None, raw: bytes | None = None) -> bytes:
    """Return a safetensors file with any header."""
    body = json.dumps(fields).encode() if raw is None else raw
    return struct.pack("<Q", len(body) if length is None else length) + body + data


HEADERS = {
    "longer than the file": header({"a": ENTRY}, length=1 << 40),
    "nested without end": header(None, raw=b'{"a":' + b"[" * 100_000),
    "no mapping": header([1]),
    "a negative shape": header({"a": ENTRY | {"shape": [-1, -1]}}),
    "a shape of fractions": header({"a": ENTRY | {"shape": [1.0]}}),
    "a shape of very many axes": header({"a": ENTRY | {"shape": [1] * 10_000}}),
    "a shape of all the memory": header({"a": ENTRY | {"shape": [1 << 40], "data_offsets": [0, 1 << 42]}}),
    "a type that is none": header({"a": ENTRY | {"dtype": ["F32"]}}),
    "places that overlap": header({"a": ENTRY, "b": ENTRY}),
    "a place before the data": header({"a": ENTRY | {"data_offsets": [-4, 0]}}),
    "bytes after the last tensor": header({"a": ENTRY}, b"12345678"),
    "a place behind the file": header({"a": ENTRY | {"data_offsets": [4, 8]}}),
    "three places": header({"a": ENTRY | {"data_offsets": [0, 4, 8]}}),
    "metadata that are a list": header({"a": ENTRY, "__metadata__": [1]}),
    "a pickle": b"\x80\x04cos\nsystem\n",
}


@pytest.mark.parametrize("kind", HEADERS)
def test_invalid_safetensors_header_is_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(HEADERS[kind])
    with pytest.raises(UserError):
        read_header(Files(tmp_path), SINGLE)


def test_valid_safetensors_header_is_read(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(header({"a": ENTRY, "__metadata__": {"format": "pt"}}))
    assert read_header(Files(tmp_path), SINGLE).tensors["a"].shape == (1,)


CONFIGS: dict[str, Any] = {
    "10**12 layers": {"num_hidden_layers": 10**12},
    "layers in words": {"num_hidden_layers": "1"},
    "sizes of fractions": {"hidden_size": 8.5},
    "a text config that is a list": {"model_type": "gemma3", "text_config": [1]},
    "rope in words": {"rope_scaling": "much"},
    "layer types in words": {"layer_types": 7, "model_type": "qwen3"},
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_config_json_with_values_of_wrong_types_is_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(json.dumps(dict(TINY) | CONFIGS[kind]))
    (tmp_path / SINGLE).write_bytes(header({"a": ENTRY}))
    with pytest.raises(UserError):
        HFCheckpoint.open(tmp_path)


@pytest.mark.parametrize("content", [b"[" * 100_000, b"{" + b" " * (1 << 26), b"\x80\x04cos\nsystem\n"])
def test_config_json_that_is_not_json_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_bytes(content)
    with pytest.raises(UserError):
        HFCheckpoint.open(tmp_path)


@pytest.mark.parametrize("file", ["../private", "/etc/passwd", "..", 7, "pickle.bin"])
def test_index_with_invalid_or_outside_file_names_is_refused(file: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "private").write_bytes(header({"a": ENTRY}))
    (folder / CONFIG).write_text(json.dumps(TINY))
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(UserError):
        HFCheckpoint.open(folder)


def test_pickled_weights_and_adapters_are_refused(tmp_path: Path) -> None:
    """Refuse a pickle, which would run code as soon as it is loaded."""
    (tmp_path / CONFIG).write_text(json.dumps(TINY))
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch CANARY'\ntR.")
    with pytest.raises(UserError, match="another format"):
        HFCheckpoint.open(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'touch CANARY'\ntR.")
    with pytest.raises(UserError, match="is a pickle, which can run any code"):
        open_adapter(tmp_path)


def test_npz_trace_with_pickled_objects_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "CANARY",)

    with (tmp_path / "trace.npz").open("wb") as file:
        np.savez(file, head=np.array([Evil()], dtype=object))
    with pytest.raises(UserError):
        read_trace(tmp_path / "trace.npz")
    assert not (tmp_path / "CANARY").exists()


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run no code of a tokenizer or a model, and do not ask whether to run it."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody is asked"))
    canary = tmp_path / "CANARY"
    (model := tmp_path / "model").mkdir()
    (model / "strange.py").write_text(f"open({str(canary)!r}, 'w')\n")
    auto = {
        "AutoConfig": "strange.C",
        "AutoModelForCausalLM": "strange.M",
        "AutoTokenizer": ["strange.T", None],
    }
    (model / CONFIG).write_text(json.dumps(dict(TINY) | {"model_type": "strange", "auto_map": auto}))
    (model / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto, "tokenizer_class": "T"}))
    settings = ModelSettings(id="strange", family="llama")
    with pytest.raises(UserError):
        load_tokenizer(model, settings, DataSettings(train=("train.jsonl",), max_length=8, packing=False))
    checkpoint = cast(HFCheckpoint, SimpleNamespace(directory=model, name="strange", dequantized=()))
    with pytest.raises(UserError):
        load_model(checkpoint, settings, meta=True, attention="eager")
    with pytest.raises(UserError):
        load_model(checkpoint, settings, attention="eager")
    (model / "model.safetensors").write_bytes(bytes(8))
    with pytest.raises(ArtifactError):
        Talk(model, Options(), print)
    assert not canary.exists()


def test_links_out_of_the_checkpoint_are_refused(tmp_path: Path) -> None:
    """Follow no link out of the checkpoint, because side files are copied.

    The hub's cache consists of links.
    """
    (tmp_path / "private").write_text("a password")
    hub = tmp_path / "hub" / "models--a--b"
    folder = hub / "snapshots" / "0123"
    folder.mkdir(parents=True)
    (hub / "blobs").mkdir()
    (hub / "blobs" / "1").write_text(json.dumps(TINY))
    (folder / CONFIG).symlink_to("../../blobs/1")
    name = "model.embed_tokens.weight"
    (folder / SINGLE).write_bytes(header({name: ENTRY}))
    assert CONFIG in HFCheckpoint.open(folder).side_files
    (folder / "LICENSE").symlink_to("../../../../private")
    with pytest.raises(UserError, match=r"is a link to .*, which is not part of the checkpoint"):
        HFCheckpoint.open(folder)


def layout(section: dict[str, Any]) -> list[Adapter]:
    """Return the adapters that a record's lora section declares."""
    settings = recorded_lora({"recipe": {"lora": section}}, base())
    assert settings is not None
    return trained_weights._recorded_adapters(base(), settings)


RECORDED = {
    "layers": "all",
    "rank": 8,
    "alpha": 8.0,
    "targets": ["q_proj"],
    "dropout": 0.0,
    "init": "peft",
    "dtype": "float32",
    "kv": "independent",
}


def base() -> HFCheckpoint:
    family = FAMILIES["llama"]
    return cast(
        HFCheckpoint, SimpleNamespace(family=family, architecture=family.architecture(TINY), name="base")
    )


@pytest.mark.parametrize(
    "changed",
    [
        *(
            {"layers": layers}
            for layers in ("0-99999999999999", f"{'9' * 4000}", {}, None, ["a"], "__import__('os')")
        ),
        *({"rank": rank} for rank in ("8", None, [8])),
        *({"targets": targets} for targets in (7, [7], [["q_proj"]], ["("])),
        *({"rank_pattern": pattern} for pattern in (7, [[1, 2, 3]], {"q_proj": "8"})),
    ],
)
def test_malformed_lora_record_gives_no_adapters(changed: dict[str, Any]) -> None:
    """Refuse a huge range of layers before it is created."""
    with suppress(UserError):
        assert layout(RECORDED | changed) == []


def test_valid_lora_record_is_read() -> None:
    assert [adapter.a_shape[-1] for adapter in layout(RECORDED)] == [8]


def test_regex_in_a_record_with_endless_backtracking_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_weights, "MATCH_SECONDS", 0.5)
    settings = lora_settings(RECORDED | {"targets": ["([a-z0-9_.]+)+!"]}, 1)
    started = time.monotonic()
    with pytest.raises(UserError, match="were not matched within"):
        trained_weights._recorded_adapters(base(), settings)
    assert time.monotonic() - started < 20


def tree(path: Path, arrays: dict[str, Any]) -> None:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(jax.tree.map(lambda array: array, arrays)))


def test_array_shapes_are_checked_before_arrays_are_restored(tmp_path: Path) -> None:
    tree(tmp_path / "tree", {"a": np.zeros((2, 3), np.float32)})
    asked: list[Any] = []

    def refuse(shapes: Any) -> None:
        asked.append(dict(shapes))
        raise UserError("too large")

    with pytest.raises(UserError, match="too large"):
        trained_weights.restore_tree(str(tmp_path / "tree"), cast(Callable[..., None], refuse))
    assert asked == [{"a": (2, 3)}]
