"""Tests of the host memory that placing a large checkpoint takes.

Arrays on virtual CPU devices are in host memory. So the whole process, including the model, must stay below
1.3 times the file's size. On an accelerator, the arrays leave the host.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from recipec.runtime.model.families import family_of
from tests.conftest import ROOT

pytestmark = pytest.mark.nightly

LAYERS = 13
CONFIG = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
"""Llama 3.1 8B with fewer layers: 7.8 GB in bfloat16.

The embedding and the output head, 1.05 GB each, are the largest arrays, and the head comes last.
"""

BUILD = """
import json, resource, sys
from pathlib import Path
import tests.conftest
from tests.runtime import training

mesh, built = training.build(Path(sys.argv[1]), {"fsdp": 4, "tp": 2}, dtype="bfloat16")
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"peak": peak, "parameters": len(built.parameters)}))
"""


def write_checkpoint(directory: Path) -> int:
    """Write a sparse file of bfloat16 zeros, and return its size in bytes."""
    family = family_of(CONFIG)
    sources = [
        (source.full_name("model."), source.shape)
        for parameter in family.parameters(family.architecture(CONFIG))
        for source in parameter.sources
    ]
    header, end = {}, 0
    for name, shape in sources:
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        return file.truncate(file.tell() + end)


def test_placing_an_8_gb_checkpoint_holds_no_second_copy(tmp_path: Path) -> None:
    size = write_checkpoint(tmp_path / "model")
    try:
        assert size > 7.5e9
        found = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", BUILD, str(tmp_path / "model")],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert found.returncode == 0, found.stderr
        peak = json.loads(found.stdout.splitlines()[-1])["peak"]
        print(f"\nfile {size / 1e9:.2f} GB, peak {peak / 1e9:.2f} GB, {peak / size:.3f} of it")
        assert peak < 1.3 * size
    finally:
        (tmp_path / "model" / "model.safetensors").unlink()
