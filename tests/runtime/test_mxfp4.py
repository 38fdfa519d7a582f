"""Tests of MXFP4 experts: equal to transformers' bit for bit, loaded, trained and merged; damaged files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from recipec.runtime.errors import UserError
from recipec.runtime.merging import merge
from recipec.runtime.model.families import UnsupportedCheckpoint, family_of
from recipec.runtime.settings import ModelSettings
from recipec.runtime.weights.checkpoint import HFCheckpoint
from recipec.runtime.weights.headers import Tensor
from recipec.runtime.weights.quantized_formats import Experts
from recipec.runtime.weights.safetensors_files import write_arrays
from tests.runtime import decoders, mxfp4
from tests.runtime.decoders import EVERY
from tests.runtime.runs import lora_section, save_run


def test_every_mxfp4_byte_and_scale_matches_transformers() -> None:
    """Cover the infinities of the largest scales too."""
    experts, outputs, groups = 4, 256, 4
    blocks = np.arange(256, dtype=np.uint8).reshape(experts, 1, groups, 16).repeat(outputs, axis=1)
    scales = np.arange(256, dtype=np.uint8).reshape(1, outputs, 1).repeat(experts, 0).repeat(groups, 2)
    expected = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
    assert expected.shape == (experts, groups * 32, outputs) and expected.dtype == torch.bfloat16
    files = {"blocks": blocks.tobytes(), "scales": b"___" + scales.tobytes()}
    tensor = Experts.of(
        Tensor("blocks", "U8", blocks.shape, 0, blocks.nbytes),
        Tensor("scales", "U8", scales.shape, 3, 3 + scales.nbytes),
        tuple(expected.shape),
    )

    def read(start: int, end: int) -> bytes:
        return bytes(tensor.bytes_of(lambda file, *place: memoryview(files[file])[slice(*place)], start, end))

    whole = read(0, tensor.size)
    assert expected.isinf().any()
    assert whole == expected.view(torch.int16).numpy().tobytes()
    assert tensor.block == len(whole) // experts
    for start, end in ((0, 1), (511, 514), (512, 4096), (tensor.block - 700, 2 * tensor.block + 33), (5, 5)):
        assert read(start, end) == whole[start:end]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Make a checkpoint with known file hashes, and transformers' model of it."""
    folder = tmp_path_factory.mktemp("mxfp4") / "base"
    model = mxfp4.make(folder)
    sums = (f"{hashlib.sha256((folder / file).read_bytes()).hexdigest()}  {file}\n" for file in mxfp4.FILES)
    (folder / "SHA256SUMS").write_text("".join(sums))
    return folder, model


def test_mxfp4_checkpoint_loads_and_merges_like_transformers(
    published: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from recipec.runtime.backends.peft_model import load_model

    folder, model = published
    base = HFCheckpoint.open(folder)
    base.verify()
    assert base.unused() == []
    experts = {f"model.layers.{i}.mlp.experts.{name}" for i in range(2) for name in mxfp4.PROJECTIONS}
    assert set(base.dequantized) == experts
    theirs = load_model(base, ModelSettings(id=str(folder), family="gpt_oss"), dtype="float32").state_dict()
    for name, value in model.state_dict().items():
        assert np.array_equal(base.read(name).astype(np.float32), value.numpy()), name
        assert theirs[name].dtype == value.dtype and theirs[name].equal(value), name
    save_run(tmp_path / "run", base, lora_section(targets=list(EVERY)))
    status = merge.main(
        tmp_path,
        ModelSettings(id=str(folder), family="gpt_oss"),
        checkpoint="run",
        output="merged",
        dtype="float32",
        max_shard_size="base",
        argv=["--verify"],
    )
    out, err = capsys.readouterr()
    assert status == 0, err
    assert "note: 4 tensors, which the base has in MXFP4, are written in bfloat16; config.json has no" in out
    assert "verified: max logits difference" in out
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    merged, info = type(model).from_pretrained(
        tmp_path / "merged", dtype="float32", attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values())
    for name in experts:
        assert merged.state_dict()[name].equal(model.state_dict()[name])


Arrays = dict[str, np.ndarray]
STEM = "model.layers.0.mlp.experts.down_proj"


def without_scales(arrays: Arrays) -> None:
    del arrays[f"{STEM}_scales"]


def without_blocks(arrays: Arrays) -> None:
    del arrays[f"{STEM}_blocks"]


def short_scales(arrays: Arrays) -> None:
    arrays[f"{STEM}_scales"] = arrays[f"{STEM}_scales"][..., :-1]


def flat_blocks(arrays: Arrays) -> None:
    arrays[f"{STEM}_blocks"] = arrays[f"{STEM}_blocks"].reshape(7, 64, -1)


def of_floats(arrays: Arrays) -> None:
    arrays[f"{STEM}_scales"] = arrays[f"{STEM}_scales"].astype(np.float16)


def twice(arrays: Arrays) -> None:
    arrays[STEM] = np.zeros((7, 96, 64), np.float16)


def of_another_size(arrays: Arrays) -> None:
    for half in ("blocks", "scales"):
        arrays[f"{STEM}_{half}"] = arrays[f"{STEM}_{half}"][:, :, :2]


DAMAGED: dict[Callable[[Arrays], None], str] = {
    without_scales: r"down_proj_blocks has no .*down_proj_scales",
    without_blocks: r"down_proj_scales has no .*down_proj_blocks",
    short_scales: r"down_proj_scales has shape \[7, 64, 2\], expected \[7, 64, 3\] as .*_blocks has",
    flat_blocks: r"down_proj_blocks has shape \[7, 64, 48\], expected three sizes and 16",
    of_floats: r"down_proj_scales has type F16, expected U8",
    twice: r"down_proj_blocks encodes .*down_proj, which is also in the file",
    of_another_size: r"down_proj has shape \[7, 64, 64\], expected \[7, 96, 64\] from config.json",
}


@pytest.mark.parametrize("damage", DAMAGED, ids=lambda damage: damage.__name__)
def test_damaged_blocks_or_scales_error_names_defect(
    published: tuple[Path, Any], tmp_path: Path, damage: Callable[[Arrays], None]
) -> None:
    arrays = {name: value for file in mxfp4.FILES for name, value in load_file(published[0] / file).items()}
    damage(arrays)
    (tmp_path / "config.json").write_bytes((published[0] / "config.json").read_bytes())
    with (tmp_path / "model.safetensors").open("wb") as file:
        write_arrays(file, arrays.items(), {})
    with pytest.raises(UserError) as refusal:
        HFCheckpoint.open(tmp_path).verify()
    assert re.search(DAMAGED[damage], refusal.value.message)
    assert str(tmp_path / "model.safetensors") in refusal.value.message


@pytest.mark.parametrize("method", [{"quant_method": "gptq"}, {}, "mxfp4"])
def test_other_quantization_methods_are_refused(method: Any) -> None:
    config = {"model_type": "gpt_oss", "quantization_config": method}
    with pytest.raises(UnsupportedCheckpoint, match="quantization_config"):
        family_of(config).architecture(config)
    plain = {**decoders.SIZES, "model_type": "gpt_oss"}
    assert family_of(plain).architecture({**plain, "quantization_config": mxfp4.METHOD}) == family_of(
        plain
    ).architecture(plain)
