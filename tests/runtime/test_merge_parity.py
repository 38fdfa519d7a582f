"""Tests of trained weights against served weights, by float32 logits.

The merged model runs in transformers, and the adapter in PEFT. `merge.py --verify` makes the same comparison
without torch.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from recipec.runtime import process_memory
from recipec.runtime.checkpoints.trained_weights import TrainedAdapters, load_trained, restore_tree
from recipec.runtime.merging import merge, verify
from recipec.runtime.merging.tensor_samples import Sampled, check_tensors
from recipec.runtime.merging.verify import LogitDifferences, logits, set_adapters, token_rows
from recipec.runtime.model.adapters import lora_settings
from recipec.runtime.model.families import FAMILIES
from recipec.runtime.model.initial import halved
from recipec.runtime.model.loading import build
from recipec.runtime.model.sharding import start_mesh
from recipec.runtime.peft.importing import import_adapter
from recipec.runtime.peft.peft_names import keys_as_values
from recipec.runtime.settings import MeshSettings, ModelSettings
from recipec.runtime.training.first_values import residual
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests import tiny
from tests.runtime import decoders
from tests.runtime.peft_import.adapters import assert_same
from tests.runtime.runs import ALL, lora_section, save_run
from tests.runtime.torch_models import (
    in_float64,
    make_gemma3_multimodal,
    make_qwen3_5_multimodal,
    torch_logits,
)

pytestmark = pytest.mark.usefixtures("compiled_once")

LIMIT = 5e-5
"""The tolerance for logits of up to 20 or 30."""

LAYOUTS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "gemma4-e2b": (
        tiny.make_gemma4,
        {**tiny.GEMMA4_E2B, "audio": True, "shards": 3},
        {"alpha_pattern": [[r"model\.language_model\.layers\.[1-3]\..*", 4.0]], "layers": "1-4"},
    ),
    "gemma4-experts": (
        tiny.make_gemma4,
        tiny.GEMMA4_EXPERTS,
        {"rslora": True, "kv": "shared", "dropout": 0.0, "targets": [*ALL, "experts", "router"]},
    ),
    "gemma3-multimodal": (
        make_gemma3_multimodal,
        {"layers": 2},
        {
            **{"targets": ["k_proj", "down_proj"], "rslora": True, "init": "pissa_niter_4"},
            "alpha_pattern": [[r"[13]\.mlp.*", 2.5]],
        },
    ),
    "gemma3-mha": (
        tiny.make_gemma3,
        {"num_key_value_heads": 8, "num_hidden_layers": 2},
        {
            **{"targets": ["q_proj", "v_proj"], "rank_pattern": [["v_proj", 5]], "kind": "dora"},
            **{"dropout": 0.0, "trainable_tokens": [137, 508, 20]},
        },
    ),
    "llama": (
        tiny.make_llama,
        {"shards": 3},
        {
            **{"alpha": 3.0, "rslora": True, "rank_pattern": [["[kv]_proj", 2]], "quantization": "nf4"},
            "trainable_tokens": [137, 20],
        },
    ),
}
"""A model of each layout of arrays or names, its sizes, and the `lora` section with model.quantization.

Ranks and alphas are recorded as pairs.
"""
ALIKE: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "gemma4-unified": (
        tiny.make_gemma4_unified,
        {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "shards": 2},
        {"targets": ["q_proj", "v_proj", "down_proj"]},
    ),
    "gemma2": (
        tiny.make_gemma2,
        {"shards": 2},
        {"rank_pattern": [["down_proj", 5], [r"layers\.0\..*", 2]], "alpha_pattern": [["q_proj", 3.0]]},
    ),
    "qwen3_5-multimodal": (
        make_qwen3_5_multimodal,
        {},
        {"targets": [r".*linear_attn\.in_proj_.*", "out_proj", "q_proj", "down_proj"]},
    ),
    "qwen3_5_moe-multimodal": (
        make_qwen3_5_multimodal,
        {"experts": True},
        {"targets": ["in_proj_qkv", "k_proj", "up_proj"], "rank_pattern": [["up_proj", 3]]},
    ),
}
"""Other models with one of these layouts."""
SECTIONS: dict[str, dict[str, Any]] = {
    "phi3": {
        "modules_to_save": ["embed_tokens", "lm_head", r"layers\.1\.input_layernorm"],
        "alpha": 3.0,
        "rslora": True,
        "rank_pattern": [["qkv_proj", 5], ["gate_up_proj", 2]],
    },
    "qwen3": {"quantization": "nf4", "alpha_pattern": [["o_proj|up_proj", 1.5]]},
    "qwen3_moe": {
        # The third layer is dense: PEFT would take its projections for experts, and has them as parameters.
        "targets": ["q_proj", "up_proj", "down_proj", "experts", "router"],
        "dropout": 0.0,
        "layers": [0, 2, 3],
        "rank_pattern": [[r"experts\.down_proj", 2]],
        "alpha_pattern": [["mlp.gate", 4.0]],
    },
    "nemotron_h": {
        "targets": ["q_proj", "in_proj", "up_proj", "experts"],
        "dropout": 0.0,
        "rank_pattern": [[r"experts\.down_proj", 2]],
    },
    "granitemoehybrid": {
        "targets": ["q_proj", "in_proj", "out_proj", "input_linear", "experts"],
        "dropout": 0.0,
        "rank_pattern": [[r"shared_mlp\.input_linear", 2]],
    },
    "jamba": {
        "targets": ["q_proj", "in_proj", "x_proj", "dt_proj", "out_proj", "down_proj", "experts"],
        "dropout": 0.0,
        "rank_pattern": [["x_proj", 2]],
        "alpha_pattern": [["dt_proj", 3.0]],
    },
}
"""Sections for families of the shared decoder. The others adapt every projection equally."""
DECODERS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    name: (partial(decoders.make, name), {}, {"targets": list(decoders.EVERY), **SECTIONS.get(name, {})})
    for name in decoders.CASES
}
CASES = LAYOUTS | ALIKE | DECODERS
NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in ALIKE]


class Case:
    """A base, random adapters, and the outputs of merging them."""

    def __init__(self, folder: Path, make: Any, sizes: dict[str, Any], section: dict[str, Any]) -> None:
        self.reference = make(folder / "base", **sizes)
        self.base = HFCheckpoint.open(folder / "base")
        self.section = lora_section(**{key: value for key, value in section.items() if key != "quantization"})
        model = {"quantization": section.get("quantization")}
        save_run(folder / "run", self.base, self.section, model=model)
        self.model = ModelSettings(id=str(folder / "base"), family=self.base.family.name)
        self.folder = folder
        status = merge.main(
            folder, self.model, checkpoint="run", output="merged", dtype="float32", adapter=True, argv=[]
        )
        assert status == 0
        self.trained: TrainedAdapters = load_trained(folder / "run", "latest", self.base)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Return a function that makes a case once by its name."""
    return cache(lambda name: Case(tmp_path_factory.mktemp(name), *CASES[name]))


def load(case: Case, folder: Path) -> Any:
    model, info = type(case.reference).from_pretrained(
        folder,
        dtype="float32",
        attn_implementation=case.reference.config._attn_implementation,
        output_loading_info=True,
    )
    assert not any(info.values()), "every tensor is known, present and of its shape"
    return model


@pytest.mark.parametrize("name", [*LAYOUTS, *NIGHTLY, *map(decoders.marked, DECODERS)])
def test_merged_model_and_exported_adapter_match_tunix_logits(
    cases: Callable[[str], Case], name: str, record_property: Callable[[str, object], None]
) -> None:
    import peft

    case = cases(name)
    # Merging uses the original weights, even if the adapters were trained on quantized ones.
    lora = case.trained.settings
    rows = token_rows(case.base.architecture.vocab_size, 8)
    rows["tokens"] %= 500  # above are the image and audio placeholders, which transformers replaces
    model = load(case, case.folder / "merged")
    merged = torch_logits(in_float64(model), rows)

    adapter = case.folder / "merged-adapter"
    wrapped = peft.get_peft_model(
        load(case, case.folder / "base"), peft.PeftConfig.from_pretrained(str(adapter))
    )
    trained = case.trained.deltas()
    # Second copies for vLLM: keys that serve as values.
    copies = {f".{values}." for _, values in keys_as_values(case.base, trained)}
    saved = {
        f"{name.removesuffix('.weight')}.default.weight"
        for name in load_file(adapter / "adapter_model.safetensors")
        if "lora_" in name and not any(copy in name for copy in copies)
    }
    assert len(saved) == (3 if case.trained.settings.kind == "dora" else 2) * len(trained)
    assert {name for name in wrapped.state_dict() if "lora_" in name} == saved, "the trained modules alone"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PEFT warns about missing and unexpected keys
        # PEFT looks for patterns of parameters among the modules, and uses them anyway.
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match")
        wrapped = peft.PeftModel.from_pretrained(load(case, case.folder / "base"), adapter)
    adapted = torch_logits(in_float64(wrapped), rows)
    if not lora.modules_to_save:
        assert import_adapter(adapter, case.base, case.folder / "run", case.folder / "imported") == 0
        trees = (restore_tree(str(case.folder / step / "model_params")) for step in ("run/4", "imported/0"))
        assert_same(*trees)

    settings = replace(case.model, dtype="float32", remat="none")
    mesh = start_mesh(MeshSettings("cpu", 4, {"fsdp": 2, "tp": 2}))
    if lora.rank == case.section["rank"]:
        built = build(case.base, settings, lora, mesh)
        set_adapters(built, case.trained, mesh)
    else:  # on the base without the adapters' initial product
        as_run = lora_settings(case.section, case.base.architecture.num_layers)
        values, start = halved({n: (d.a, d.b) for n, d in trained.items()})
        built = build(residual(case.base, as_run, start), settings, as_run, mesh, (), values)
    expected = logits(built, rows, mesh)
    differences = [float(np.abs(found - expected).max()) for found in (merged, adapted)]
    figures = ", ".join(f"{difference:.1e}" for difference in differences)
    size = float(np.abs(expected).max())
    record_property("merged", max(differences) / size)
    print(f"\n{name}: merged and adapter differ by {figures} of {size:.1f}")
    assert max(differences) <= (decoders.LIMIT * size if name in DECODERS else LIMIT)
    effect = np.abs(merged - torch_logits(case.reference, rows)).max()
    assert effect > 0.1, "the adapters do something"
    assert_merged_as_by_peft(case, model.state_dict(), wrapped.merge_and_unload().state_dict())
    sampled = check_tensors(case.base, case.trained, case.folder / "merged", "float32")
    assert sampled.trained == len(case.trained.changes(case.base)) and sampled.share <= 1


def assert_merged_as_by_peft(case: Case, merged: dict[str, Any], by_peft: dict[str, Any]) -> None:
    """Check that each tensor is PEFT's, by adapter_config.json, and that the others are the base's."""
    before = case.reference.state_dict()
    assert merged.keys() == by_peft.keys()
    differences = {name: float((merged[name] - by_peft[name]).abs().max()) for name in merged}
    assert max(differences.values()) <= 1e-6, max(differences, key=lambda name: differences[name])
    changed = {name for name in merged if not merged[name].equal(before[name])}
    changed -= {"lm_head.weight"} if case.reference.config.get_text_config().tie_word_embeddings else set()
    assert len(changed) == len(case.trained.deltas()) + len(case.trained.parameters)
    assert all(merged[name].equal(by_peft[name]) for name in merged.keys() - changed)
    if case.trained.numbers:
        name = next(name for name in changed if name.endswith("embed_tokens.weight"))
        rows = (merged[name] != before[name]).any(-1).nonzero().flatten().tolist()
        assert rows == sorted(case.trained.numbers), "all other rows are the base's, bit for bit"


def run_merge(case: Case, folder: Path, dtype: str, *argv: str, run: Path | None = None) -> int:
    return merge.main(
        folder,
        case.model,
        checkpoint=str(run or case.folder / "run"),
        output="merged",
        dtype=dtype,
        adapter=False,
        argv=list(argv),
    )


def run_verify(case: Case, folder: Path, dtype: str, run: Path | None = None) -> int:
    return run_merge(case, folder, dtype, "--verify", run=run)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("small"), tiny.make_gemma3, {"num_hidden_layers": 1}, {})


def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the comparison of tensors."""
    monkeypatch.setattr(verify, "check_tensors", lambda *arguments: Sampled())


def test_verify_finds_wrong_file_by_hash_tensors_and_logits(
    small: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_merge(small, tmp_path, "bfloat16") == 0
    file, name = tmp_path / "merged" / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensor = HFCheckpoint.open(tmp_path / "merged").tensors[name]
    data = bytearray(file.read_bytes())
    middle = (tensor.start + tensor.end) // 4 * 2
    half = data[tensor.start : middle]
    data[tensor.start : middle] = data[middle : 2 * middle - tensor.start]
    data[middle : middle + len(half)] = half
    file.write_bytes(data)
    assert run_verify(small, tmp_path, "bfloat16") == 1
    assert f"{file}: is not what was written: its SHA-256 is" in capsys.readouterr().err

    record = json.loads((tmp_path / "merged" / "merge.json").read_text())
    record["files"][file.name]["sha256"] = hashlib.sha256(data).hexdigest()
    (tmp_path / "merged" / "merge.json").write_text(json.dumps(record))
    assert run_verify(small, tmp_path, "bfloat16") == 1
    assert f"{file}: {name} is not what was trained" in capsys.readouterr().err

    blind(monkeypatch)
    assert run_verify(small, tmp_path, "bfloat16") == 1
    assert "is not what was trained: logits differ by" in capsys.readouterr().err


def test_verify_skips_logits_if_memory_is_short(
    small: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*arguments: object) -> None:
        raise MemoryError("the model was built")

    monkeypatch.setattr(verify, "compare", too_large)
    monkeypatch.setattr(verify, "available_memory", lambda: 10**9)
    assert run_verify(small, tmp_path, "bfloat16") == 0
    *_, files, tensors, note, last = capsys.readouterr().out.splitlines()
    count = len(list((tmp_path / "merged").iterdir())) - 1
    assert re.fullmatch(rf"files: {count}, .* MB, are those that were written \(SHA-256\)", files)
    assert tensors.startswith("tensors: all 7 trained ones are right in ")
    assert re.fullmatch(
        r"note: logits are not compared: they need about 1\.\d GB, 1\.0 GB are available", note
    )
    assert last == f"verified: {count} files and {len(small.base.tensors)} tensors, not logits"
    monkeypatch.setattr(verify, "available_memory", lambda: None)
    with pytest.raises(MemoryError):
        run_verify(small, tmp_path, "bfloat16")


def test_available_memory_respects_machine_and_container_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr(process_memory, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(process_memory, "CGROUP", tmp_path)
    assert process_memory.available_memory() is None
    (tmp_path / "meminfo").write_text("MemTotal:  100 kB\nMemAvailable:   80 kB\n")
    assert process_memory.available_memory() == 80 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert process_memory.available_memory() == 80 * 1024
    for name, text in (("max", "50000\n"), ("current", "40000\n"), ("stat", "anon 1\ninactive_file 7000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert process_memory.available_memory() == 17_000, "a container's limit, less what cannot be dropped"


def test_verify_warns_about_zero_or_tiny_adapters(
    small: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_effect = LogitDifferences(1.0, 1e-5, 0.0, 1e-3, 0.0, 1e-3, 1e-3, "bfloat16")
    monkeypatch.setattr(verify, "compare", lambda *arguments: tiny_effect)
    assert run_verify(small, tmp_path / "tiny", "bfloat16") == 0
    assert "little of what was trained is in the merged model" in capsys.readouterr().out
    save_run(tmp_path / "run", small.base, lora_section(), scale=0.0)
    assert run_verify(small, tmp_path / "zero", "bfloat16", run=tmp_path / "run") == 0
    assert "are all zero: the merged model is the base" in capsys.readouterr().out


def test_merge_cases_cover_every_family() -> None:
    assert {name.partition("-")[0] for name in CASES} == set(FAMILIES)
