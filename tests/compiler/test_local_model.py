"""Tests of a checkpoint's own config.json: it overrides the catalog, and a broken one is a diagnostic."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler import catalog
from recipec.compiler.catalog import finding
from recipec.compiler.lower import Lowered
from recipec.runtime.model.families import UnsupportedCheckpoint
from recipec.runtime.model.families.decoder_family import DecoderArchitecture

Lower = Callable[..., Lowered]
TINY = catalog.entries()["recipec/tiny-gemma4"]["config"]
SETS = ("model.id=./checkpoint", "mesh={accelerator: cpu-2, axes: {fsdp: 2}}", "lora.rank=8")


def write(tmp_path: Path, config: Any) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))


def changed(**values: Any) -> dict[str, Any]:
    config = copy.deepcopy(TINY)
    config["text_config"] |= values
    return config


def test_local_config_json_gives_the_model_sizes(lowered: Lower, tmp_path: Path) -> None:
    write(tmp_path, changed(hidden_size=128))
    program = lowered(*SETS).program
    assert program is not None
    assert program.architecture.hidden_size == 128
    assert program.model_origin == "./checkpoint/config.json"


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"hidden_size": 0}, "E0803"),
        ({"num_hidden_layers": 10**9}, "E0803"),
        ({"hidden_size_per_layer_input": "x"}, "E0803"),
        ({"hidden_activation": "sine"}, "E0803"),
        ({"final_logit_softcapping": float("nan")}, "E0803"),
        ({"sliding_window": 10**400}, "E0803"),
    ],
)
def test_invalid_values_in_config_json_are_errors(
    values: dict[str, Any], code: str, lowered: Lower, tmp_path: Path
) -> None:
    write(tmp_path, changed(**values))
    assert code in {d.code for d in lowered(*SETS).diagnostics}


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, '{"model_type": "dbrx"}'])
def test_malformed_config_json_is_a_diagnostic(text: str, lowered: Lower, tmp_path: Path) -> None:
    write(tmp_path, text)
    found = [d for d in lowered(*SETS).diagnostics if d.severity == "error"]
    assert [d.code[:3] for d in found] == ["E08"] and found[0].path == "model.id"


@pytest.mark.parametrize(
    "model_id", ["./absent", "~nobody-of-that-name/x", "gs://bucket/model", "owner/model"]
)
def test_unreadable_or_unknown_model_id_is_a_diagnostic(model_id: str, lowered: Lower) -> None:
    found = [d for d in lowered(f"model.id={model_id}").diagnostics if d.severity == "error"]
    assert [d.code[:3] for d in found] == ["E08"] and found[0].help


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("google/gemma-4-31b-it", "google/gemma-4-31B-it"),
        ("gemma-4-31B-it", "google/gemma-4-31B-it"),
        ("google/gemma3-4b-it", "google/gemma-3-4b-it"),
    ],
)
def test_error_suggests_the_most_similar_model_id(wrong: str, right: str, tmp_path: Path) -> None:
    with pytest.raises(catalog.UnknownModel) as caught:
        catalog.find(wrong, tmp_path)
    assert caught.value.help.startswith(f"did you mean `{right}`?")


@pytest.mark.parametrize(
    "model_id",
    [
        "Qwen/Qwen3-Embedding-8B",
        "someone/Qwen-1.5B-tuned",
        "upstage/SOLAR-10.7B-v1.0",
        "owner/Lama-3.1-8B",
    ],
)
def test_error_suggests_no_model_of_another_publisher(model_id: str, tmp_path: Path) -> None:
    with pytest.raises(catalog.UnknownModel) as caught:
        catalog.find(model_id, tmp_path)
    assert "did you mean" not in caught.value.help
    assert f"`recipe models add {model_id} -o {tmp_path}/models`" in caught.value.help


@pytest.mark.parametrize(
    ("model_id", "family"),
    [
        ("Qwen/Qwen2-Audio-7B-Instruct", "Qwen 2 and 3 with sound"),
        ("Phi-3.5-MoE-instruct", "Phi 3 small, with experts or with images"),
        ("meta-llama/Llama-Guard-4-12B", "Llama Guard 4"),
        ("THUDM/glm-4-9b-chat", "ChatGLM, and GLM 4 of 2024 with its own code"),
        ("zai-org/GLM-4.5V", "GLM 4 with images"),
        ("mistralai/Mamba-Codestral-7B-v0.1", "Mamba"),
        ("allenai/OLMo-7B", "OLMo 1 with its own code"),
        ("google/recurrentgemma-2b", "RecurrentGemma"),
    ],
)
def test_id_of_an_unsupported_family_is_refused(model_id: str, family: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint) as caught:
        catalog.find(model_id, tmp_path)
    assert str(caught.value) == f"recipec has no model for {family}" and caught.value.key == "model_type"


def test_ids_similar_to_supported_models_are_unknown_not_unsupported(tmp_path: Path) -> None:
    others = ("google/codegemma-2b", "THUDM/GLM-4-32B-0414", "nvidia/Llama-3.1-Nemotron-Nano-8B-v1")
    one_of_each = {
        entry["family"]: name for name, entry in catalog.entries().items() if "unsupported" not in entry
    }
    for model_id in (*others, *one_of_each.values()):
        with pytest.raises(catalog.UnknownModel):
            catalog.find(f"{model_id}-x", tmp_path)


def test_copies_of_a_model_use_the_catalog_entry_of_the_original(lowered: Lower) -> None:
    program = lowered("model.id=unsloth/gemma-4-31B-it").program
    assert program is not None and program.recipe.model.id == "unsloth/gemma-4-31B-it"
    assert program.architecture == catalog.find("google/gemma-4-31B-it", Path()).architecture
    assert catalog.title("NousResearch/Meta-Llama-3.1-8B-Instruct") == "Llama 3.1 8B"


@pytest.mark.parametrize(
    ("copy", "original"),
    [
        ("unsloth/llama-2-7b-chat", "meta-llama/Llama-2-7b-chat-hf"),
        ("alpindale/Mistral-7B-v0.2-hf", "mistral-community/Mistral-7B-v0.2"),
        ("CohereForAI/c4ai-command-r7b-12-2024", "CohereLabs/c4ai-command-r7b-12-2024"),
        ("TheBloke/Llama-2-7B-GPTQ", "meta-llama/Llama-2-7b-hf"),
        ("nvidia/Qwen3-32B-NVFP4", "Qwen/Qwen3-32B"),
        ("RedHatAI/phi-4-quantized.w8a8", "microsoft/phi-4"),
        ("hugging-quants/Meta-Llama-3.1-405B-BNB-NF4-BF16", "meta-llama/Llama-3.1-405B"),
        (
            "axolotl-quants/Llama-4-Scout-17B-16E-Linearized-bnb-nf4-bf16",
            "meta-llama/Llama-4-Scout-17B-16E",
        ),
        ("ISTA-DASLab/Meta-Llama-3-8B-Instruct-AQLM-2Bit-1x16", "meta-llama/Meta-Llama-3-8B-Instruct"),
        ("someone/google-gemma-2-9b", "google/gemma-2-9b"),
        ("someone/our-gemma-2-9b", None),
        ("someone/Llama-2-7b-tuned", None),
    ],
)
def test_original_of_maps_mirrors_to_their_originals(copy: str, original: str | None) -> None:
    assert catalog.original_of(copy) == original


@pytest.mark.parametrize("copy", ["unsloth/Qwen3-8B-bnb-4bit", "Qwen/Qwen3-8B-AWQ", "x/Qwen3-8B-GGUF"])
def test_quantized_copy_is_refused_with_the_id_of_the_original(copy: str, tmp_path: Path) -> None:
    with pytest.raises(catalog.UnknownModel) as caught:
        catalog.find(copy, tmp_path)
    assert (caught.value.code, caught.value.help) == ("E0803", "id: Qwen/Qwen3-8B")


@pytest.mark.parametrize(("kind", "apart"), [("olmoe", True), ("granitemoe", False)])
def test_family_decides_the_expert_layout_if_only_config_json_is_known(kind: str, apart: bool) -> None:
    model = finding.read("./checkpoint", {"model_type": kind}, "config.json")
    assert isinstance(model.architecture, DecoderArchitecture) and model.architecture.experts is not None
    assert model.architecture.experts.tensors.apart is apart
