"""Tests that docs/extending.md's family of one module, and its template, work in a copy of the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.docs.blocks import blocks

ROOT = Path(__file__).parents[2]

CONFIG = {
    "architectures": ["Exaone4ForCausalLM"],
    "model_type": "exaone4",
    "hidden_size": 5120,
    "vocab_size": 102_400,
    "intermediate_size": 27_392,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "sliding_window": 4096,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1_000_000.0,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16,
    "bos_token_id": 1,
    "eos_token_id": 361,
    "pad_token_id": 0,
}

RECIPE = """\
recipe: 1
name: new
model: {id: ./checkpoint}
mesh: {accelerator: v5p-32, axes: {fsdp: 16, tp: 1}}
lora: {rank: 16}
data: {train: [{path: data/train.jsonl}]}
train: {global_batch_size: 16, micro_batch_size: 1}
checkpoint: {directory: gs://bucket/run}
serve: {accelerator: v6e-8, tensor_parallel_size: 8, weights: adapter}
"""

MINIATURE = """
import json, pathlib
from recipec.compiler.miniature.small_checkpoint import shrink, write_checkpoint

config = shrink(json.loads(pathlib.Path("checkpoint/config.json").read_text()), {"fsdp": 2, "tp": 2})
write_checkpoint(pathlib.Path("small"), config, dtype="float32")
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the checkout with the page's files, and with a recipe of one of the family's models in work/."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("recipec", "spec", "compiler", "port", "runtime", "templates", "docs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, root / name, symlinks=True, ignore=ignored)
    files = {block.title: block.text for block in blocks(ROOT / "docs" / "extending.md") if block.title}
    (module,) = (path for path in files if path.startswith("runtime/"))
    for path in (module, "templates/Makefile.j2", "compiler/emitters/makefile.py"):
        assert not (root / path).exists()
        (root / path).write_text(files[path], encoding="utf-8")
    (root / "emit.diff").write_text(files["compiler/emitters/emit.py"], encoding="utf-8")
    subprocess.run(["git", "apply", "emit.diff"], cwd=root, check=True, timeout=60)
    (root / "work" / "checkpoint").mkdir(parents=True)
    (root / "work" / "checkpoint" / "config.json").write_text(json.dumps(CONFIG))
    (root / "work" / "recipe.yaml").write_text(RECIPE)
    return root


def run(copy: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=copy / "work",
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_recipe_of_a_new_family_is_checked_explained_and_built(copy: Path) -> None:
    recipe = "-m", "recipec.compiler.cli.main"
    checked = run(copy, *recipe, "check", "recipe.yaml", "--notes")
    assert "error" not in checked
    # vLLM's own model supports adapters, as its table says about the class.
    assert "N0647" in checked and "E0645" not in checked
    explained = run(copy, *recipe, "explain", "recipe.yaml")
    assert "64 layers" in explained
    run(copy, *recipe, "build", "recipe.yaml", "--backend", "trl")
    built = copy / "work" / "generated"
    makefile = (built / "new" / "Makefile").read_text()
    assert makefile.startswith("# new: the commands of README.md.\n.PHONY: train merge\n")
    assert "Makefile" in json.loads((built / "new" / "recipe.lock.json").read_text())["files"]
    (wheel,) = built.glob("recipec_runtime-*.whl")
    with zipfile.ZipFile(wheel) as modules:
        assert any(name.endswith("/model/families/exaone4.py") for name in modules.namelist())
    assert 'family="exaone4"' in (built / "new" / "train.py").read_text()
    accelerate = (built / "new" / "baseline" / "accelerate.yaml").read_text()
    assert "fsdp_transformer_layer_cls_to_wrap: Exaone4DecoderLayer" in accelerate


def test_miniature_of_a_new_family_loads_in_transformers(copy: Path) -> None:
    import torch
    import transformers

    run(copy, "-c", MINIATURE)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        copy / "work" / "small", output_loading_info=True
    )
    assert type(loaded).__name__ == "Exaone4ForCausalLM"
    assert {kind: list(found) for kind, found in info.items() if found} == {}
    sizes = loaded.config
    assert (sizes.num_attention_heads, sizes.num_key_value_heads, sizes.num_hidden_layers) == (10, 2, 4)
    assert loaded(input_ids=torch.arange(3, 43).reshape(2, 20)).logits.std() > 1
    tokenizer = transformers.AutoTokenizer.from_pretrained(copy / "work" / "small")
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "[|assistant|]user\nHello[|endofturn|]\n[|assistant|]assistant\nYes.[|endofturn|]\n"
