"""Tests of full fine-tuning: twenty steps against transformers, resuming, and Hugging Face's names."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from safetensors.numpy import save_file

from recipec.runtime.checkpoints.resuming import describe
from recipec.runtime.checkpoints.saving import Checkpoints, StepArrays
from recipec.runtime.merging import merge
from recipec.runtime.merging.journal import RECORD
from recipec.runtime.merging.verify import logits, token_rows
from recipec.runtime.model.families import FAMILIES as ALL
from recipec.runtime.model.families.decoder_family import DecoderFamily
from recipec.runtime.model.sharding import start_mesh
from recipec.runtime.settings import MeshSettings, ModelSettings
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests import tiny
from tests.runtime import decoders, training
from tests.runtime.references import losses, torch_loss
from tests.runtime.runs import write_lock
from tests.runtime.torch_models import make_gemma3_multimodal, make_qwen3_5_multimodal, torch_logits

pytestmark = pytest.mark.usefixtures("compiled_once")
"""The runs are the same program."""

MESH = {"fsdp": 4, "tp": 2}
STEPS = 20
SIZES = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "gemma4": lambda folder: tiny.make_gemma4(folder, shards=3, **SIZES),
    "llama": lambda folder: tiny.make_llama(folder, num_hidden_layers=2),
    "starcoder2": functools.partial(decoders.make, "starcoder2"),
}
ONLY = {"gemma4-some": ("layers.1.mlp.(gate|up)_proj", "k_proj", "v_proj", "input_layernorm")}
"""The trained parts of a model, if not all: an array with its neighbor, and arrays of one of two layers."""
MODELS["gemma4-some"] = MODELS["gemma4"]
MARKED = [
    "gemma4",
    "gemma4-some",
    *(pytest.param(name, marks=pytest.mark.e2e) for name in ("llama", "starcoder2")),
]
RATE = 1e-3

FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gemma2": (tiny.make_gemma2, {"shards": 2}),
    "gemma3": (tiny.make_gemma3, {"num_hidden_layers": 1, "num_key_value_heads": 1}),
    "gemma3-mha": (tiny.make_gemma3, {"num_hidden_layers": 1, "num_key_value_heads": 8}),
    "gemma3-multimodal": (make_gemma3_multimodal, {}),
    "gemma4-e2b": (tiny.make_gemma4, {**tiny.GEMMA4_E2B, "audio": True}),
    "gemma4-experts": (tiny.make_gemma4, {**tiny.GEMMA4_EXPERTS, "shards": 3}),
    "qwen3_5_moe-multimodal": (make_qwen3_5_multimodal, {"experts": True}),
    **{name: (functools.partial(decoders.make, name), {}) for name in decoders.CASES},
}
"""Models whose weights go through a Tunix checkpoint without training."""


class Case:
    """A run over all parameters in Tunix, and the same run in transformers."""

    def __init__(self, family: str, folder: Path) -> None:
        self.folder = folder
        self.reference = MODELS[family](folder / "base")
        self.base = HFCheckpoint.open(folder / "base")
        self.only = ONLY.get(family, ())
        mesh, self.built = training.build(folder / "base", MESH, full=True, only=self.only)
        with mesh:
            self.trainer = training.trainer(
                self.built, mesh, folder / "run", rule(), 1, every_steps=STEPS // 2
            )
            training.fit(self.trainer, folder / "run", STEPS, lambda step: RATE, 1)
        write_lock(folder / "run", self.base, None, only=self.only)
        self.model = ModelSettings(id=str(folder / "base"), family=self.base.family.name)
        self.by_torch, self.torch_losses = self.train_torch()

    def train_torch(self) -> tuple[Any, list[float]]:
        model = self.load("base")
        for name, parameter in model.named_parameters():
            module = name[name.find("layers.") :].removesuffix(".weight")
            whole = not self.only or any(re.search(f"(^|[.]){one}$", module) for one in self.only)
            parameter.requires_grad_("vision" not in name and whole)
        weights = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=RATE, weight_decay=0.01)
        found = []
        for step in range(STEPS):
            loss = torch_loss(model, training.batch(step))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            found.append(float(loss))
        return model, found

    def load(self, name: str) -> Any:
        model, info = type(self.reference).from_pretrained(
            self.folder / name, dtype="float32", output_loading_info=True
        )
        assert not any(info.values()), "every tensor is known, present and of its shape"
        return model


def rule() -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE, weight_decay=0.01))


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    @functools.cache
    def of(family: str) -> Case:
        with jax.default_matmul_precision("highest"):
            return Case(family, tmp_path_factory.mktemp(family))

    return of


@pytest.fixture(scope="module")
def case(cases: Callable[[str], Case]) -> Case:
    return cases("gemma4")


@pytest.mark.parametrize("family", MARKED)
def test_twenty_full_steps_match_transformers_losses(family: str, cases: Callable[[str], Case]) -> None:
    case = cases(family)
    found = losses(case.folder / "run")["loss"]
    difference = np.abs(np.array(found) - case.torch_losses).max()
    print(f"\n{family}: losses differ by {difference:.1e}, from {found[0]:.2f} to {found[-1]:.2f}")
    assert difference <= 1e-4


def rows() -> dict[str, np.ndarray]:
    return token_rows(500, 8)  # above are the image and audio placeholders, which transformers replaces


def run_merge(case: Case, folder: Path, dtype: str, *argv: str, adapter: bool = False) -> int:
    return merge.main(
        folder,
        case.model,
        checkpoint=str(case.folder / "run"),
        output="merged",
        dtype=dtype,
        adapter=adapter,
        max_shard_size="base",
        argv=list(argv),
    )


@pytest.mark.parametrize("family", MARKED)
def test_merged_folder_logits_match_trained_model(
    family: str, cases: Callable[[str], Case], capsys: pytest.CaptureFixture[str]
) -> None:
    """Compare the merged folder in transformers with Tunix's model, and run `--verify` without torch."""
    case = cases(family)
    assert run_merge(case, case.folder, "float32", "--verify") == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("verified: max logits difference ")
    assert "the trained weights change logits by" in out
    one = rows()
    merged = torch_logits(case.load("merged"), one)
    ours = logits(case.built, one, start_mesh(MeshSettings("cpu", 8, MESH)))
    theirs = torch_logits(case.by_torch, one)
    moved = np.abs(merged - torch_logits(case.reference, one)).max()
    from_tunix, from_torch = (float(np.abs(merged - other).max()) for other in (ours, theirs))
    print(f"\n{family}: merged and Tunix {from_tunix:.1e}, and torch {from_torch:.1e}; moved {moved:.1f}")
    assert from_tunix <= 5e-5
    assert from_torch <= 5e-3, "twenty steps of Adam apart"
    assert moved > (0.1 if case.only else 1)
    merged_base = HFCheckpoint.open(case.folder / "merged")
    same = {
        name for name in case.base.tensors if np.array_equal(case.base.read(name), merged_base.read(name))
    }
    trained = [p for p in case.built.parameters if p.trainable]
    changed = {source.full_name(case.base.prefix) for p in trained for source in p.sources}
    assert not changed & same, "what is trained changes"
    assert not case.only or set(case.base.tensors) - changed == same, "and nothing else"


def trained_elsewhere(base: HFCheckpoint, folder: Path) -> dict[str, np.ndarray]:
    """Write a checkpoint like a base with other random text weights, and return those weights."""
    random = np.random.default_rng(1)
    arrays = {name: np.array(base.read(name)) for name in base.tensors}
    trained = {
        source.full_name(base.prefix)
        for parameter in base.family.parameters(base.architecture)
        for source in parameter.sources
        if not parameter.buffer
    }
    for name in trained:
        arrays[name] = random.standard_normal(arrays[name].shape).astype(np.float32)
    folder.mkdir()
    shutil.copyfile(base.directory / "config.json", folder / "config.json")
    save_file(arrays, folder / "model.safetensors")
    return {name: arrays[name] for name in trained}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly)
        if name == "gemma3-multimodal"  # its parts are those of gemma3 and of gemma4-e2b
        else pytest.param(name, marks=pytest.mark.e2e)
        if name == "gemma3-mha"
        else decoders.marked(name)
        if name in decoders.CASES
        else name
        for name in FAMILIES
    ],
)
def test_full_checkpoint_merges_back_to_hugging_face_tensors(name: str, tmp_path: Path) -> None:
    """Load into Tunix, save from Tunix, and merge.

    Every number has its old name, and the rest is unchanged.
    """
    make, sizes = FAMILIES[name]
    make(tmp_path / "base", **sizes)
    base = HFCheckpoint.open(tmp_path / "base")
    trained = trained_elsewhere(base, tmp_path / "trained")
    mesh, built = training.build(tmp_path / "trained", MESH, full=True)
    checkpoints = Checkpoints(str(tmp_path / "run"), keep=1)
    with mesh:
        checkpoints.write(STEPS, StepArrays(built.model, None, lora_only=False), describe({}))
        checkpoints.finish()
    write_lock(tmp_path / "run", base, None)
    model = ModelSettings(id=str(base.directory), family=base.family.name)
    paths = {"checkpoint": str(tmp_path / "run"), "output": "merged"}
    assert merge.main(tmp_path, model, **paths, dtype="float32", adapter=False, argv=[]) == 0
    merged = HFCheckpoint.open(tmp_path / "merged")
    assert merged.tensors.keys() == base.tensors.keys()
    for tensor in base.tensors:
        expected = trained[tensor] if tensor in trained else base.read(tensor)
        assert merged.read(tensor).tobytes() == expected.tobytes(), tensor
    untrained = {tensor.removeprefix(base.prefix) for tensor in base.tensors.keys() - trained.keys()}
    text = {tensor for tensor in untrained if tensor.startswith("layers.")}
    if name == "glm_moe_dsa":  # its indexer is neither computed nor trained
        text = {tensor for tensor in text if ".indexer." not in tensor}
    buffers = ("layer_scalar", "e_score_correction_bias", "expert_bias", "act_fn.beta", "act_fn.eps")
    assert all(tensor.endswith(buffers) for tensor in text), "all of the text model but its buffers"


def test_merge_back_cases_cover_every_tunix_family() -> None:
    assert {name.partition("-")[0] for name in FAMILIES} >= {
        name for name, family in ALL.items() if not isinstance(family, DecoderFamily)
    }


def test_merge_keeps_untrained_tensors_byte_for_byte(case: Case) -> None:
    if not (case.folder / "merged").is_dir():
        assert run_merge(case, case.folder, "float32") == 0
    merged = HFCheckpoint.open(case.folder / "merged")
    assert merged.files == case.base.files and len(merged.files) > 1
    same = {
        name for name in case.base.tensors if bytes(merged.bytes_of(name)) == bytes(case.base.bytes_of(name))
    }
    text = {name for name in case.base.tensors if name.startswith(case.base.prefix)}
    assert same == {
        name for name in case.base.tensors if name not in text or name.endswith("layer_scalar")
    }, "the vision tower and the buffers"
    record = json.loads((case.folder / "merged" / RECORD).read_text())
    assert (record["checkpoint"]["step"], record["lora"]) == (STEPS, None)
    counts = {"merged": len(case.base.tensors) - len(same), "kept": len(same), "quantized": 0}
    assert record["tensors"] == counts


def test_full_fine_tuning_merges_in_bfloat16_and_has_no_peft_adapter(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_merge(case, tmp_path, "bfloat16", adapter=True) == 1
    assert "has no LoRA that a PEFT adapter could hold" in capsys.readouterr().err
    assert run_merge(case, tmp_path, "bfloat16", "--verify") == 0
    assert "rounded to bfloat16" in capsys.readouterr().out


def test_resumed_full_run_ends_with_identical_arrays(case: Case, tmp_path: Path) -> None:
    """Resume at the tenth step's checkpoint, with parameters, moments and buffers."""
    folder = tmp_path / "run"
    shutil.copytree(case.folder / "run", folder)
    shutil.rmtree(folder / str(STEPS))
    mesh, built = training.build(case.folder / "base", MESH, full=True)
    with mesh:
        trainer = training.trainer(built, mesh, folder, rule(), 1, every_steps=STEPS // 2)
        assert trainer.train_steps == STEPS // 2
        training.fit(trainer, folder, STEPS, lambda step: RATE, 1)
    for ours, theirs in ((built.model, case.built.model), (trainer.optimizer, case.trainer.optimizer)):
        found, expected = training.arrays(ours), training.arrays(theirs)
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[path], expected[path]) for path in found)
