"""Gemma 4 with pictures against transformers 5.24. Earlier versions see pictures both ways in all layers."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.runtime import towers, training

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("highest")]

VERSION = "5.24.0"
PACKAGES = (f"transformers=={VERSION}", "tokenizers==0.23.1", "safetensors==0.8.0")
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / f"transformers-{VERSION}"
"""transformers of this version, and what it needs in a later version than the tests'."""

REFERENCE = """
import sys

import numpy as np
import torch
import transformers

assert transformers.__version__ == sys.argv[3]
config = transformers.AutoConfig.from_pretrained(sys.argv[1])
config._attn_implementation = "eager"
load = transformers.AutoModelForImageTextToText.from_pretrained
model = load(sys.argv[1], config=config, dtype=torch.float32).eval()
given = {name: torch.tensor(value) for name, value in np.load(sys.argv[2] + "/given.npz").items()}
tokens = given["input_ids"]
given["attention_mask"] = model.create_masks_for_generate(
    model.config,
    torch.zeros(*tokens.shape, model.config.get_text_config().hidden_size),
    torch.ones_like(tokens),
    None,
    torch.arange(tokens.shape[1])[None],
    mm_token_type_ids=given["mm_token_type_ids"],
)
with torch.no_grad():
    np.save(sys.argv[2] + "/logits.npy", model(**given).logits[0].numpy())
"""
"""Computes logits. Its arguments are the folders of the checkpoint and of the inputs, and the version.

The masks are those of generation: the 12B's own forward still lets pictures see both ways in all layers.
"""


def install() -> Path:
    """Return the folder of transformers, and install it if it is not there (70 MB)."""
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with FOLDER.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (FOLDER / "installed").is_file():
            shutil.rmtree(FOLDER, ignore_errors=True)
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            command += ["--no-cache-dir", "--no-deps", "--target", str(FOLDER), *PACKAGES]
            done = subprocess.run(command, text=True, capture_output=True)
            assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-4000:]}"
            (FOLDER / "installed").touch()
    return FOLDER


@pytest.mark.parametrize("case", ["gemma4-both_ways", "gemma4_unified-both_ways", "gemma4"])
def test_logits_with_pictures_equal_later_transformers(case: str, tmp_path: Path) -> None:
    model, _ = towers.reference(case)
    model.save_pretrained(tmp_path / "base")
    mesh, built = training.build(tmp_path / "base", {"fsdp": 2}, images=True, full=True, remat="none")
    vision = built.forward.architecture.vision
    pictures = towers.Pictures.of(vision)
    one = towers.tokens_of(pictures)
    found = training.logits(built, mesh, one)
    causal = training.logits(built, mesh, {**one, "image_ids": np.zeros_like(one["image_ids"])})
    environment = {**os.environ, "PYTHONPATH": str(install())}
    for r, row in enumerate(pictures.rows):
        real = one["segment_ids"][r] > 0
        kinds = (one["image_ids"][r, real][None] > 0).astype(np.int64)
        given = {name: value.numpy() for name, value in pictures.arguments(model, row).items()}
        tokens = one["tokens"][r, real][None].astype(np.int64)
        np.savez(tmp_path / "given.npz", input_ids=tokens, mm_token_type_ids=kinds, **given)
        command = [sys.executable, "-c", REFERENCE, str(tmp_path / "base"), str(tmp_path), VERSION]
        done = subprocess.run(command, env=environment, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr[-4000:]
        wanted = np.load(tmp_path / "logits.npy")
        got = found[r, real]
        # The causal case, with clipped linears, has more of float32's noise: 1.2e-5 was seen.
        limit = 1e-5 if vision.both_ways else 2e-5
        assert np.abs(got - wanted).max() <= limit * np.abs(wanted).max()
        if vision.both_ways:
            assert np.abs(causal[r, real] - wanted).max() > 0.01 * np.abs(wanted).max()
