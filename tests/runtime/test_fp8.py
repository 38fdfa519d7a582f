"""Weights in FP8: their values against transformers' own, to the bit; checkpoints of them loaded and merged
as if they were stored in bfloat16; and damaged ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from recipec.runtime.errors import UserError
from recipec.runtime.merging import merge
from recipec.runtime.merging.verify import token_rows
from recipec.runtime.model.loading import build
from recipec.runtime.model.sharding import start_mesh
from recipec.runtime.settings import MeshSettings, ModelSettings
from recipec.runtime.weights.checkpoint import HFCheckpoint
from recipec.runtime.weights.headers import Tensor
from recipec.runtime.weights.quantized_formats import Fp8, sentence
from recipec.runtime.weights.safetensors_files import CODES, write_arrays
from tests.runtime import fp8
from tests.runtime.decoders import EVERY, LIMIT
from tests.runtime.runs import lora_section, save_run
from tests.runtime.torch_models import torch_logits

BLOCKED, PER_MATRIX = "minimax_m2", "ministral3-mistral3"
CASES = {BLOCKED: fp8.BLOCK, PER_MATRIX: None}
ARRAYS = {
    "blocks that do not divide": ((150, 77), (32, 24), (5, 4), np.float32),
    "a block larger than the matrix": ((5, 3), (128, 128), (1, 1), np.float32),
    "scales in bfloat16": ((64, 96), (32, 32), (2, 3), ml_dtypes.bfloat16),
    "experts": ((3, 64, 96), (32, 32), (3, 2, 3), np.float32),
    "experts that blocks do not divide": ((3, 40, 33), (32, 32), (3, 2, 2), np.float32),
    "one scale": ((600, 1100), None, (), ml_dtypes.bfloat16),
    "one scale on an axis": ((600, 11), None, (1,), np.float32),
    "one scale for each expert": ((3, 40, 33), None, (3, 1, 1), np.float32),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_dequantized_values_match_transformers(case: str) -> None:
    """transformers reads blocks of equal size; others follow its formula, with each code's own block."""
    shape, block, grid, kind = ARRAYS[case]
    random = np.random.default_rng(3)
    codes = random.permutation(np.arange(np.prod(shape)) % 256).astype(np.uint8).reshape(shape)
    codes[codes & 127 == 127] = 8  # no NaN
    scales = (random.random(grid, np.float32) * 1e-2).astype(kind) if grid else np.array(0.0123, kind)
    files = {"codes": codes.tobytes(), "scales": b"___" + scales.tobytes()}
    stored = Tensor("scales", CODES[scales.dtype], grid, 3, 3 + scales.nbytes)
    tensor = Fp8(block).packed(Tensor("codes", "F8_E4M3", shape, 0, codes.size), stored, shape)

    def read(start: int, end: int) -> bytes:
        return bytes(tensor.bytes_of(lambda file, *place: memoryview(files[file])[slice(*place)], start, end))

    numbers = torch.tensor(codes).view(torch.float8_e4m3fn)
    factors = torch.tensor(scales.astype(np.float32))
    if block is None or all(n % b == 0 for n, b in zip(shape[-2:], block, strict=True)):
        expected = Fp8Dequantize(None)._dequantize_one(numbers, factors, torch.bfloat16)
    else:
        whole = factors.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
        expected = (numbers.float() * whole[..., : shape[-2], : shape[-1]]).bfloat16()
    whole_bytes = read(0, tensor.size)
    assert whole_bytes == expected.view(torch.int16).numpy().tobytes()
    size, row = tensor.size, 2 * shape[-1]
    for begin, end in ((0, 1), (row - 1, row + 3), (size // 3, size // 2), (size - 5, size), (4, 4)):
        assert read(begin, end) == whole_bytes[begin:end]


def make(case: str, folder: Path) -> Any:
    """Return a checkpoint, transformers' model of it, and the checkpoint that transformers dequantized."""
    model = fp8.make(case, folder / "base", CASES[case])
    plain = type(model)(type(model.config).from_dict(without(model.config.to_dict())))
    plain.bfloat16().load_state_dict(model.state_dict())
    plain.save_pretrained(folder / "plain")
    return folder / "base", model, folder / "plain"


def without(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "quantization_config"}


@pytest.mark.parametrize("case", CASES)
def test_fp8_checkpoint_loads_like_bfloat16_checkpoint(case: str, tmp_path: Path) -> None:

    from recipec.runtime.backends.peft_model import load_model

    folder, model, plain = make(case, tmp_path)
    base, other = HFCheckpoint.open(folder), HFCheckpoint.open(plain)
    base.verify()
    assert base.unused() == [] and base.config == without(json.loads((folder / "config.json").read_text()))
    assert len(base.dequantized) == sum(".layers." in n and "vision" not in n for n in base.dequantized) > 10
    assert re.fullmatch(
        r"\d+ tensors of the checkpoint are stored in FP8, in 0\.\dMB; they are read as bfloat16, which .*",
        sentence(base),
    )
    settings = ModelSettings(id=str(folder), family=base.family.name, dtype="float32", remat="none")
    if "vision_config" not in base.config:  # transformers has no causal model of Mistral 3 with images
        theirs = load_model(base, settings).state_dict()
        assert theirs.keys() == model.state_dict().keys()
        assert all(theirs[name].equal(value.float()) for name, value in model.state_dict().items())
    mesh = start_mesh(MeshSettings("cpu", 4, {"fsdp": 2, "tp": 2}))
    ours, same = (jax.tree.leaves(build(one, settings, None, mesh).model) for one in (base, other))
    assert len(ours) == len(same) and all(map(np.array_equal, ours, same))


@pytest.mark.e2e
def test_fp8_base_merges_like_dequantized_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, model, plain = make(BLOCKED, tmp_path / "bases")
    found = {}
    for name, source in (("fp8", folder), ("plain", plain)):
        base = HFCheckpoint.open(source)
        save_run(tmp_path / f"run-{name}", base, lora_section(targets=list(EVERY)))
        status = merge.main(
            tmp_path,
            ModelSettings(id=str(source), family=base.family.name),
            checkpoint=f"run-{name}",
            output=name,
            dtype="bfloat16",
            max_shard_size="base",
            argv=["--verify"] if name == "fp8" else [],
        )
        out, err = capsys.readouterr()
        assert status == 0, err
        assert ("which the base has in FP8, are written in bfloat16" in out) is (name == "fp8")
        merged = HFCheckpoint.open(tmp_path / name)
        assert not any("scale" in tensor or merged.tensors[tensor].form for tensor in merged.tensors)
        assert {path.name for path in (tmp_path / name).glob("*.safetensors")} == {*merged.files}
        assert "quantization_config" not in json.loads((tmp_path / name / "config.json").read_text())
        found[name] = type(model).from_pretrained(
            tmp_path / name, dtype="float32", attn_implementation="eager", output_loading_info=True
        )
        assert not any(found[name][1].values())
    rows = token_rows(base.architecture.vocab_size, 8)
    ours, theirs = (torch_logits(made, rows) for made, _ in found.values())
    before = torch_logits(model.float(), rows)
    assert np.array_equal(ours, theirs) and np.abs(ours - before).max() > LIMIT * np.abs(before).max()


Arrays = dict[str, np.ndarray]
STEM = "model.layers.0.self_attn.q_proj"


def changed(**named: Callable[[np.ndarray], np.ndarray] | None) -> Callable[[Arrays], None]:
    """Replace tensors of the projection, or remove them."""

    def change(arrays: Arrays) -> None:
        for name, made in named.items():
            value = arrays.pop(f"{STEM}.{name}")
            if made is not None:
                arrays[f"{STEM}.{name}"] = made(value)

    return change


def activation(arrays: Arrays) -> None:
    arrays["model.norm.activation_scale"] = np.zeros((), np.float32)


def all_plain(arrays: Arrays) -> None:
    for name in [*arrays]:
        if name.endswith("_scale_inv"):
            del arrays[name]
        else:
            arrays[name] = arrays[name].astype(np.float32)


DAMAGED: dict[str, tuple[Callable[[Arrays], None], str]] = {
    "no scales": (changed(weight_scale_inv=None), r"q_proj.weight has type F8_E4M3 and no .*_scale_inv"),
    "no codes": (changed(weight=None), r"q_proj.weight_scale_inv has no .*q_proj.weight"),
    "scales of another shape": (
        changed(weight_scale_inv=lambda scales: scales[:, :-1]),
        r"_scale_inv has shape \[24, 3\], expected \[24, 4\] for \[96, 48\] and weight_block_size \[4, 12\]",
    ),
    "scales of whole numbers": (
        changed(weight_scale_inv=lambda scales: np.ones(scales.shape, np.uint8)),
        r"_scale_inv has type U8, which is not a float type",
    ),
    "codes that are none": (
        changed(weight=lambda codes: codes.astype(np.float32)),
        r"q_proj.weight has type F32, expected F8_E4M3 as it has a scale",
    ),
    "codes of another kind": (
        changed(weight=lambda codes: codes.astype(ml_dtypes.float8_e5m2), weight_scale_inv=None),
        r"q_proj.weight has type F8_E5M2, which is not a float type",
    ),
    "codes on one axis": (
        changed(weight=lambda codes: codes.reshape(-1)),
        r"q_proj.weight has shape \[4608\], and F8_E4M3 is read only for matrices",
    ),
    "activations of no weight": (activation, r"norm.activation_scale has no|norm.weight has type BF16"),
    "nothing in FP8": (all_plain, r"and no tensor has F8_E4M3, which config.json names"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8") / "blocked"
    fp8.make(BLOCKED, folder, fp8.BLOCK)
    return folder


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_fp8_checkpoint_error_names_defect(whole: Path, tmp_path: Path, damage: str) -> None:
    opened = HFCheckpoint.open(whole)
    arrays: Arrays = {}
    for name, tensor in opened.tensors.items():
        arrays[name] = opened.read(name)
        if tensor.form:
            value = np.random.default_rng(0).standard_normal(tensor.shape, np.float32)
            arrays[name], arrays[f"{name}_scale_inv"] = fp8.quantized(value, fp8.BLOCK)
    DAMAGED[damage][0](arrays)
    (tmp_path / "config.json").write_bytes((whole / "config.json").read_bytes())
    with (tmp_path / "model.safetensors").open("wb") as file:
        write_arrays(file, arrays.items(), {})
    with pytest.raises(UserError) as refusal:
        HFCheckpoint.open(tmp_path).verify()
    assert re.search(DAMAGED[damage][1], refusal.value.message)
    assert str(tmp_path / "model.safetensors") in refusal.value.message


@pytest.mark.parametrize("size", [[128], [0, 128], "128", [128, True], {}])
def test_invalid_weight_block_size_is_refused(whole: Path, tmp_path: Path, size: Any) -> None:
    for file in (*fp8.FILES, "config.json", "model.safetensors.index.json"):
        (tmp_path / file).write_bytes((whole / file).read_bytes())
    fp8.describe(tmp_path, quant_method="fp8", weight_block_size=size)
    with pytest.raises(UserError, match=r"weight_block_size is .*, neither two sizes nor null"):
        HFCheckpoint.open(tmp_path)


def test_fp8_weights_without_quantization_config_are_refused(whole: Path, tmp_path: Path) -> None:
    for file in (*fp8.FILES, "model.safetensors.index.json"):
        (tmp_path / file).write_bytes((whole / file).read_bytes())
    config = without(json.loads((whole / "config.json").read_text()))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="has type F8_E4M3, which is not a float type"):
        HFCheckpoint.open(tmp_path).verify()
