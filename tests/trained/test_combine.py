"""Tests of `recipe adapters merge`: the numbers of PEFT's add_weighted_adapter, readable by PEFT and runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from recipec.compiler.cli.main import app
from recipec.compiler.errors import ArtifactError
from recipec.compiler.trained.combine import Combination, combine
from recipec.runtime.checkpoints.trained_weights import TrainedAdapters, load_trained
from recipec.runtime.errors import UserError
from recipec.runtime.peft.importing import import_adapter
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests import tiny
from tests.runtime.runs import lora_section, write_lock
from tests.trained.conftest import adapted

WEIGHTS = (0.7, -0.4)
METHODS = ("linear", "dare_ties")


@pytest.fixture(scope="module")
def other(model: Path) -> Path:
    """Make an adapter with another alpha, on one module that the first adapter has and one that it lacks."""
    targets = ["q_proj", "v_proj"]
    return adapted(model, model.parent / "other", 2, target_modules=targets, lora_alpha=6, use_rslora=True)


def merged(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["adapters", "merge", *map(str, arguments)])


def tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("method", METHODS)
def test_merged_adapter_matches_peft_add_weighted_adapter(
    model: Path,
    adapter: Path,
    other: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    import torch
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    def mask(tensor: Any) -> Any:
        """Replace random draws, which have another order in PEFT."""
        kept = torch.arange(tensor.numel()).reshape(tensor.shape) % 3 != 0
        return kept.to(tensor.dtype)

    monkeypatch.setattr(torch, "bernoulli", mask)
    given = [] if method == "linear" else ["--density", 0.4]
    words = ["--method", method, "--weights", ",".join(map(str, WEIGHTS))]
    done = merged(adapter, other, "-o", tmp_path / "both", *words, *given)
    assert done.exit_code == 0, (done.output, done.exception)

    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(model)

    theirs = PeftModel.from_pretrained(base(), adapter, adapter_name="a")
    theirs.load_adapter(other, "b")
    theirs.add_weighted_adapter(["a", "b"], list(WEIGHTS), "both", method, density=0.4)
    expected = get_peft_model_state_dict(theirs, adapter_name="both")
    found = tensors(tmp_path / "both")
    assert found.keys() == expected.keys() and len(found) == 2 * 2 * 3
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)
    theirs.set_adapter("both")
    ours = PeftModel.from_pretrained(base(), tmp_path / "both")
    ids = torch.arange(20)[None] + 30
    with torch.inference_mode():
        logits, plain = theirs(ids).logits, base()(ids).logits
        torch.testing.assert_close(ours(ids).logits, logits, rtol=1e-6, atol=1e-6 * float(logits.abs().max()))
    assert float((logits - plain).abs().max()) > 0.1


def test_merged_adapter_can_be_imported_into_a_run(tmp_path: Path) -> None:
    tiny.make_llama(tmp_path / "base")
    ranks = {"v_proj": 2}
    folders = [
        adapted(tmp_path / "base", tmp_path / name, 1, target_modules=[name, "v_proj"], rank_pattern=ranks)
        for name in ("q_proj", "down_proj")
    ]
    combine(Combination(folders, WEIGHTS, "ties", 0.4), tmp_path / "both")
    base = HFCheckpoint.open(tmp_path / "base")
    section = lora_section(rank=4, alpha=4.0, targets=["q_proj", "down_proj", "v_proj"])
    section |= {"rank_pattern": ranks, "alpha_pattern": ranks}
    write_lock(tmp_path / "artifact", base, section)
    assert import_adapter(tmp_path / "both", base, tmp_path / "artifact", tmp_path / "run") == 0
    trained = load_trained(tmp_path / "run", "latest", base)
    assert isinstance(trained, TrainedAdapters)
    found = tensors(tmp_path / "both")
    for name, delta in trained.deltas().items():
        (a,) = (tensor for key, tensor in found.items() if f".{name}.lora_A" in key)
        assert delta.scale == 1 and (delta.a == a.numpy()).all()


def test_dare_seed_and_first_adapters_template_determine_result(
    adapter: Path, other: Path, tmp_path: Path
) -> None:
    made = []
    own = shutil.copytree(adapter, tmp_path / "own")
    (own / "chat_template.jinja").write_text("own")
    for number, seed in enumerate((3, 3, 4)):
        combine(Combination([adapter, other], WEIGHTS, "dare_linear", 0.5, seed), tmp_path / str(number))
        made.append((tmp_path / str(number) / "adapter_model.safetensors").read_bytes())
    assert made[0] == made[1] != made[2]
    combine(Combination([own, other], WEIGHTS, "linear"), tmp_path / "both")
    assert (tmp_path / "both" / "chat_template.jinja").read_text() == "own"
    assert {path.name for path in (tmp_path / "0").iterdir()} < {
        p.name for p in (tmp_path / "both").iterdir()
    }


def test_shared_key_value_adapters_stay_equal_after_merge(model: Path, tmp_path: Path) -> None:
    """Write k_proj's A and B under v_proj's name too, as merge.py does."""
    from safetensors.torch import save_file

    folders = []
    for seed in (1, 2):
        folder = adapted(model, tmp_path / f"of-{seed}", seed, target_modules=["k_proj", "v_proj"])
        found = tensors(folder)
        copied = {
            name: found[name.replace("v_proj", "k_proj")].clone() if "v_proj" in name else found[name]
            for name in found
        }
        save_file(copied, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        folders.append(folder)
    combine(Combination(folders, (0.5, 0.5), "dare_ties", 0.5), tmp_path / "both")
    both = tensors(tmp_path / "both")
    for name in both:
        assert (both[name] == both[name.replace("v_proj", "k_proj")]).all()


def test_incompatible_adapters_are_refused(model: Path, adapter: Path, other: Path, tmp_path: Path) -> None:
    wide = adapted(model, tmp_path / "wide", 3, r=8)
    layer = adapted(model, tmp_path / "layer", 3, layers_to_transform=[0], layers_pattern="layers")
    pattern = adapted(model, tmp_path / "pattern", 3, target_modules=r".*\.q_proj")
    for second, message in (
        (wide, "rank 4, 8, which cannot be added"),
        (layer, "layers_to_transform"),
        (pattern, "target_modules is a list"),
        (adapted(model, tmp_path / "rows", 3, trainable_token_indices=[3]), "rows of the embedding"),
    ):
        with pytest.raises(ArtifactError, match=message):
            combine(Combination([adapter, second], (1, 1), "linear"), tmp_path / "out")
    with pytest.raises(UserError, match=r"no adapter_config\.json"):
        combine(Combination([adapter, model], (1, 1), "linear"), tmp_path / "out")
    config = json.loads((other / "adapter_config.json").read_text())
    for key, value, kind in (
        ("use_dora", True, UserError),
        ("base_model_name_or_path", "another", ArtifactError),
        ("target_parameters", ["experts.down_proj"], ArtifactError),
    ):
        folder = tmp_path / key
        folder.mkdir()
        (folder / "adapter_model.safetensors").symlink_to(other / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(kind):
            combine(Combination([adapter, folder], (1, 1), "linear"), tmp_path / "out")
    with pytest.raises(ArtifactError, match="already exists"):
        combine(Combination([adapter, other], (1, 1), "linear"), adapter)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("--weights", "1"),
        ("--weights", "1,x"),
        ("--weights", "nan,1"),
        ("--weights", "0,0"),
        ("--weights", "1,1", "--density", "0.5"),
        ("--weights", "1,1", "--method", "ties"),
        ("--weights", "1,1", "--method", "ties", "--density", "1"),
    ],
)
def test_invalid_options_exit_with_2(adapter: Path, other: Path, tmp_path: Path, words: Any) -> None:
    assert merged(adapter, other, "-o", tmp_path / "out", *words).exit_code == 2
