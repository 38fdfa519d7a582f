"""Tests of rsLoRA, rank_pattern and alpha_pattern against PEFT: trained, merged and exported."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipec.compiler.lowering.program import trained_size
from recipec.runtime.merging import merge
from recipec.runtime.model.adapters import LoraSettings, build_adapters, by_pattern, lora_settings
from recipec.runtime.model.families import FAMILIES
from recipec.runtime.model.initial import initial_pair
from recipec.runtime.model.lora import trained_mask
from recipec.runtime.settings import ModelSettings
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests import tiny
from tests.runtime import training
from tests.runtime.references import losses, reference_logits, split
from tests.runtime.runs import lora_section, write_lock
from tests.runtime.torch_models import torch_logits

SIZES = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
OPTIONS: dict[str, Any] = {
    "rank": 4,
    "alpha": 8.0,
    "rslora": True,
    "rank_pattern": {"k_proj": 2, "down_proj": 6},
    "alpha_pattern": {r"layers\.0\.self_attn\.[kv]_proj": 3.0},
    "layers": (0, 2),
}
STEPS = 4


def gemma4_adapters(**options: Any) -> dict[str, Any]:
    family = FAMILIES["gemma4"]
    architecture = family.architecture({**tiny.gemma4_text(**SIZES), "model_type": "gemma4_text"})
    lora = LoraSettings(**{"dropout": 0.0, "rank": 4, "alpha": 8.0, "targets": training.TARGETS, **options})
    return {a.target.weight: a for a in build_adapters(family, architecture, lora)}


@pytest.mark.parametrize(
    ("patterns", "module"),
    [
        ({"k_proj": 2, "down_proj": 6}, "layers.3.self_attn.k_proj"),
        ({"k_proj": 2, "down_proj": 6}, "layers.3.mlp.down_proj"),
        ({"proj": 2}, "layers.3.self_attn.k_proj"),
        ({".*k_proj": 2, r"self_attn\.k_proj": 3}, "layers.3.self_attn.k_proj"),
        ({r"self_attn\.k_proj": 3, ".*k_proj": 2}, "layers.3.self_attn.k_proj"),
        ({r"layers\.[0-2]\..*": 2}, "layers.3.self_attn.k_proj"),
        ({r"layers\.(1|3)\.self_attn\.[qk]_proj": 2}, "layers.13.self_attn.k_proj"),
        ({r"model\.layers\.3\.mlp\.up_proj": 9}, "layers.3.mlp.up_proj"),
        ({r"^model\.layers\.3\.mlp\.up_proj": 9}, "layers.3.mlp.up_proj"),
        ({"q_proj|k_proj": 5}, "layers.3.self_attn.k_proj"),
        ({"self_attn": 5}, "layers.3.self_attn.k_proj"),
    ],
)
def test_pattern_lookup_matches_peft(patterns: dict[str, int], module: str) -> None:
    from peft.utils.other import get_pattern_key

    name = f"model.{module}"
    expected = patterns.get(get_pattern_key(list(patterns), name), 4)
    assert by_pattern(patterns, module, 4) == expected


def test_fused_projections_keep_separate_ranks_and_scales() -> None:
    adapter = gemma4_adapters(**OPTIONS)["layers.0.attn.kv_einsum.w"]
    assert (adapter.a_shape, adapter.b_shape) == ((64, 6), (6, 2, 4, 16))
    key, value = adapter.projections
    assert (key.block, value.block) == (slice(0, 2), slice(2, 6))
    assert (key.scale, value.scale) == (3.0 / math.sqrt(2), 3.0 / math.sqrt(4))
    mask = trained_mask(adapter)
    assert mask.shape == (6, 2, 1, 1)
    assert mask[:, 0, 0, 0].tolist() == [1, 1, 0, 0, 0, 0]
    assert mask[:, 1, 0, 0].tolist() == [0, 0, 1, 1, 1, 1]
    assert trained_size(adapter) == 64 * 6 + 6 * 4 * 16
    lora = LoraSettings(**OPTIONS, dropout=0.0, targets=())
    alone = gemma4_adapters(**OPTIONS | {"targets": ("v_proj",)})["layers.0.attn.kv_einsum.w"]
    assert np.array_equal(initial_pair(adapter, lora, 7)[0][:, 2:], initial_pair(alone, lora, 7)[0])


def test_shared_kv_adapter_refuses_different_ranks_or_alphas() -> None:
    with pytest.raises(ValueError, match=r"layers.0.self_attn.k_proj and layers.0.self_attn.v_proj share"):
        gemma4_adapters(kv="shared", rank_pattern={"k_proj": 2})
    with pytest.raises(ValueError, match="share one A"):
        gemma4_adapters(kv="shared", alpha_pattern={"v_proj": 2.0})
    adapters = gemma4_adapters(kv="shared", rank_pattern={"[kv]_proj": 2})
    assert adapters["layers.0.attn.kv_einsum.w"].a_shape == (64, 2)


def test_old_record_without_patterns_or_rslora_is_read() -> None:
    section = lora_section()
    for key in ("quantize", "rslora", "rank_pattern", "alpha_pattern"):
        section.pop(key, None)
    settings = lora_settings(section, 6)
    assert (settings.rslora, settings.rank_pattern, settings.quantize) == (False, {}, None)
    recorded = lora_settings({**section, "rank_pattern": [["v_proj", 2], [".*", 3]]}, 6)
    assert list(recorded.rank_pattern) == ["v_proj", ".*"], "the order of the record's pairs counts"


class Case:
    """Four steps in Tunix and in PEFT from the same adapters, and the outputs of merging Tunix's."""

    def __init__(self, folder: Path) -> None:
        import optax

        self.folder = folder
        self.reference = tiny.make_gemma4(folder / "base", multimodal=False, **SIZES)
        self.base = HFCheckpoint.open(folder / "base")
        schedule = optax.constant_schedule(1e-2)
        mesh, built = training.build(folder / "base", {"fsdp": 4, "tp": 2}, **OPTIONS)
        start = split(built)
        with mesh:
            trainer = training.trainer(
                built, mesh, folder / "run", optax.adamw(schedule, weight_decay=0.0), 1, every_steps=STEPS
            )
            training.fit(trainer, folder / "run", STEPS, schedule, 1)
        self.losses = losses(folder / "run")["loss"]
        section = {key: list(value.items()) if "pattern" in key else value for key, value in OPTIONS.items()}
        write_lock(folder / "run", self.base, lora_section(**section, dropout=0.0))
        self.peft, self.peft_losses = self.train_peft(start)
        model = ModelSettings(id=str(folder / "base"), family="gemma4")
        status = merge.main(
            folder, model, checkpoint="run", output="merged", dtype="float32", adapter=True, argv=[]
        )
        assert status == 0

    def load(self, name: str) -> Any:
        return type(self.reference).from_pretrained(self.folder / name, dtype="float32")

    def train_peft(self, start: dict[str, tuple[np.ndarray, np.ndarray]]) -> tuple[Any, list[float]]:
        import peft
        import torch

        config = peft.LoraConfig(
            r=OPTIONS["rank"],
            lora_alpha=OPTIONS["alpha"],
            use_rslora=True,
            rank_pattern=OPTIONS["rank_pattern"],
            alpha_pattern=OPTIONS["alpha_pattern"],
            layers_to_transform=list(OPTIONS["layers"]),
            target_modules=list(training.TARGETS),
        )
        model = peft.get_peft_model(self.load("base"), config)
        weights = {
            name[name.index("layers.") :].removesuffix(".default.weight"): parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        expected = {
            f"{name}.lora_{letter}": pair[i].shape
            for name, pair in start.items()
            for i, letter in enumerate("AB")
        }
        assert {name: tuple(w.shape) for name, w in weights.items()} == expected, "the same ranks as PEFT's"
        with torch.no_grad():
            for name, pair in start.items():
                for letter, value in zip("AB", pair, strict=True):
                    weights[f"{name}.lora_{letter}"].copy_(torch.tensor(value))
        optimizer = torch.optim.AdamW(weights.values(), lr=1e-2, weight_decay=0.0)
        found = []
        for step in range(STEPS):
            one = training.batch(step)
            chosen = torch.log_softmax(reference_logits(model, one)[:, :-1].float(), -1)
            targets = torch.tensor(one["tokens"][:, 1:]).long()
            nll = -chosen.gather(-1, targets[..., None])[..., 0]
            loss = (nll * torch.tensor(one["loss_mask"][:, 1:])).sum() / float(one["norm"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(float(loss))
        return model, found


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    import jax

    with jax.default_matmul_precision("highest"):
        return Case(tmp_path_factory.mktemp("patterns"))


def test_training_with_patterns_matches_peft_losses(case: Case) -> None:
    difference = np.abs(np.array(case.losses) - case.peft_losses).max()
    print(f"\nlosses differ by {difference:.1e} of {case.losses[0]:.1f}")
    assert difference <= 1e-4


def test_merged_model_and_exported_adapter_match_peft_logits(case: Case) -> None:
    import peft

    from recipec.runtime.merging.logits import token_rows

    rows = token_rows(500, 8)
    expected = torch_logits(case.peft, rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PEFT warns about missing and unexpected keys
        adapted = peft.PeftModel.from_pretrained(case.load("base"), case.folder / "merged-adapter")
    found = {"merged": torch_logits(case.load("merged"), rows), "adapter": torch_logits(adapted, rows)}
    differences = {name: float(np.abs(logits - expected).max()) for name, logits in found.items()}
    print(f"\n{differences} of {np.abs(expected).max():.1f}")
    assert max(differences.values()) <= 5e-5
    assert np.abs(expected - torch_logits(case.reference, rows)).max() > 0.1


def test_exported_adapter_config_records_rslora_and_patterns(case: Case) -> None:
    config = json.loads((case.folder / "merged-adapter" / "adapter_config.json").read_text())
    assert config["use_rslora"] is True
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert list(config["rank_pattern"].items()) == [("k_proj", 2), ("down_proj", 6)]
    assert config["alpha_pattern"] == {r"layers\.0\.self_attn\.[kv]_proj": 3}


def test_export_writes_full_names_for_patterns_peft_reads_differently() -> None:
    from recipec.runtime.peft.exporting import peft_pattern

    wanted = {"model.language_model.layers.0.mlp.up_proj": 2, "model.language_model.layers.1.mlp.up_proj": 4}
    assert peft_pattern({r"^model\.layers\.0\..*": 2}, wanted, 4) == {
        r"model\.language_model\.layers\.0\.mlp\.up_proj": 2
    }
    assert peft_pattern({r"layers\.0\..*": 2}, wanted, 4) == {r"layers\.0\..*": 2}
    assert peft_pattern({"(": 9, r"layers\.0\..*": 2}, wanted, 4) == {
        r"model\.language_model\.layers\.0\.mlp\.up_proj": 2
    }
    assert peft_pattern({"up_proj": 2}, {"model.layers.0.mlp.up_proj.weight": 2}, 4) == {
        r"model\.layers\.0\.mlp\.up_proj(\.weight)?": 2
    }, "of a weight, which PEFT knows by its own name, and an import by its module's"
