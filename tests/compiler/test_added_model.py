"""Tests of a model added next to a recipe: found by its id and commit, with tensors that match the family."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler import catalog
from recipec.compiler.emitters.emit import emit
from recipec.compiler.lower import Lowered, lower
from recipec.compiler.lowering.at_hand import AtHand, look
from recipec.compiler.miniature.small_checkpoint import complete, write_checkpoint
from recipec.spec.load import load
from tests.compiler.added_models import COMMIT, CONFIG, FOLDER, ID, Tensors, add, checkpoint, tensors_of

RECIPE = f"""\
recipe: 1
name: example
model: {{id: {ID}}}
mesh: {{accelerator: cpu-2, axes: {{fsdp: 2}}}}
lora: {{rank: 8}}
data: {{train: [train.jsonl]}}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], Tensors]:
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    return checkpoint(folder), tensors_of(folder)


@pytest.fixture
def files(model: tuple[dict[str, bytes], Tensors]) -> dict[str, bytes]:
    return dict(model[0])


@pytest.fixture
def tensors(model: tuple[dict[str, bytes], Tensors]) -> Tensors:
    return dict(model[1])


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    )
    file = Path("recipe.yaml")
    file.write_text(RECIPE)
    return file


def lowered(recipe: Path, *sets: str) -> Lowered:
    return lower(load(recipe, sets))


def errors(found: Lowered) -> list[tuple[str, str, str]]:
    """Return the code, place and sentence of the model's errors and warnings."""
    return [
        (one.code, one.path, one.message)
        for one in found.diagnostics
        if one.severity == "error" or one.code == "W0816"
    ]


def test_added_model_is_found_by_its_id_and_locked_to_its_commit(
    recipe: Path, files: dict[str, bytes], tensors: Tensors
) -> None:
    assert [code for code, *_ in errors(lowered(recipe))] == ["E0801"]
    add(Path(), files, tensors)
    found = lowered(recipe)
    program = found.program
    assert program is not None, errors(found)
    assert program.model_origin == f"{FOLDER}/config.json" and program.architecture.hidden_size == 64
    artifact = emit(program)
    settings = artifact["train.py"].decode()
    assert f'id="{ID}"' in settings and f'revision="{COMMIT}"' in settings
    assert json.loads(artifact["recipe.lock.json"])["recipe"]["model"]["revision"] == COMMIT


@pytest.mark.parametrize("given", ["v1", COMMIT])
def test_model_revision_resolves_to_the_added_commit(
    given: str, recipe: Path, files: dict[str, bytes], tensors: Tensors
) -> None:
    add(Path(), files, tensors, revision="v1")
    program = lowered(recipe, f"model.revision={given}").program
    assert program is not None and program.recipe.model.revision == COMMIT


def test_revision_that_was_not_added_is_an_error(
    recipe: Path, files: dict[str, bytes], tensors: Tensors
) -> None:
    add(Path(), files, tensors, revision="v1")
    found = lowered(recipe, "model.revision=v2")
    assert errors(found) == [
        (
            "E0815",
            "model.revision",
            f"model.revision is v2, and {FOLDER} was added at v1, commit {COMMIT}",
        )
    ]
    assert f"`recipe models add {ID} --revision v2`" in str(found.diagnostics[0].help)


LAYER = "model.layers.0"


def without(*names: str) -> Callable[[Tensors], Any]:
    return lambda tensors: [tensors.pop(name) for name in names]


def having(**changed: tuple[str, list[int]]) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name.replace("__", "."): one for name, one in changed.items()})


def awq(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors.pop(name)
        tensors[name.replace(".weight", ".qweight")] = ("I32", [64, 8])
        tensors[name.replace(".weight", ".qzeros")] = ("I32", [1, 8])


def gptq(tensors: Tensors) -> None:
    awq(tensors)
    tensors[f"{LAYER}.self_attn.q_proj.g_idx"] = ("I32", [64])


def bnb(tensors: Tensors) -> None:
    tensors[f"{LAYER}.mlp.up_proj.weight"] = ("U8", [3072, 1])
    tensors[f"{LAYER}.mlp.up_proj.weight.absmax"] = ("U8", [96])


def fp8(tensors: Tensors) -> None:
    tensors[f"{LAYER}.mlp.up_proj.weight"] = ("F8_E4M3", [96, 64])
    tensors[f"{LAYER}.mlp.up_proj.weight_scale_inv"] = ("F32", [1, 1])


LIST = f"{FOLDER}/tensors.json"
WRONG: dict[str, tuple[Callable[[Tensors], Any], str, str]] = {
    "one missing": (
        without(f"{LAYER}.mlp.up_proj.weight"),
        "E0811",
        f"{LIST}: {LAYER}.mlp.up_proj.weight is missing; config.json promises it with shape [96, 64]",
    ),
    "several missing": (
        without(f"{LAYER}.mlp.up_proj.weight", f"{LAYER}.mlp.down_proj.weight", "model.norm.weight"),
        "E0811",
        f"{LIST}: {LAYER}.mlp.up_proj.weight is missing; config.json promises it with shape [96, 64], "
        "and 2 others too",
    ),
    "no text": (
        without("model.embed_tokens.weight"),
        "E0811",
        f"{LIST}: none of the 23 tensors is a text embedding, which would be "
        "model.language_model.embed_tokens.weight, language_model.model.embed_tokens.weight or "
        "model.embed_tokens.weight",
    ),
    "another shape": (
        having(model__layers__1__mlp__up_proj__weight=("BF16", [95, 64])),
        "E0812",
        f"{LIST}: model.layers.1.mlp.up_proj.weight has shape [95, 64], expected [96, 64] from config.json "
        "(model.safetensors)",
    ),
    "no float": (
        having(model__norm__weight=("I16", [64])),
        "E0813",
        f"{LIST}: model.norm.weight has type I16, which is not a float type (model.safetensors)",
    ),
    "more layers": (
        having(model__layers__2__mlp__up_proj__weight=("BF16", [96, 64])),
        "E0814",
        f"{LIST}: model.layers.2.mlp.up_proj.weight is of layer 2, and config.json has num_hidden_layers 2, "
        "which ends at layer 1 (model.safetensors)",
    ),
    **{
        method: (
            change,
            "E0813",
            f"`{ID}` has weights that are stored quantized ({method}): {LIST} lists their tensors",
        )
        for method, change in {"AWQ": awq, "GPTQ": gptq, "bitsandbytes": bnb, "FP8": fp8}.items()
    },
}


@pytest.mark.parametrize("kind", WRONG)
def test_tensors_that_do_not_fit_the_family_are_an_error(
    kind: str, recipe: Path, files: dict[str, bytes], tensors: Tensors
) -> None:
    change, code, said = WRONG[kind]
    change(tensors)
    add(Path(), files, tensors)
    assert errors(lowered(recipe)) == [(code, "model.id", said)]


def test_added_model_that_differs_from_the_catalog_gives_a_warning(
    recipe: Path, files: dict[str, bytes], tensors: Tensors
) -> None:
    known = "Qwen/Qwen3-0.6B"
    add(Path(), files, tensors, id=known)
    found = lowered(recipe, f"model.id={known}")
    program = found.program
    assert program is not None and program.architecture.hidden_size == 64
    ((code, path, message),) = errors(found)
    assert (code, path) == ("W0816", "model.id") and "hidden_size" in message and known in message
    config = {**CONFIG, **catalog.entries()[known]["config"]}
    files["config.json"] = json.dumps(config).encode()
    add(Path(), files, tensors, id=known)
    assert "W0816" not in [code for code, *_ in errors(lowered(recipe, f"model.id={known}"))]


@pytest.mark.parametrize(
    ("how", "name"),
    [("gone", "config.json"), ("gone", "model.lock.json"), ("changed", "tensors.json")],
)
def test_missing_or_changed_file_of_an_added_model_is_an_error(
    how: str, name: str, recipe: Path, files: dict[str, bytes], tensors: Tensors
) -> None:
    file = add(Path(), files, tensors, revision="v1") / name
    file.unlink() if how == "gone" else file.write_bytes(b"{}")
    found = lowered(recipe)
    ((code, path, message),) = errors(found)
    assert path == "model.id"
    if (how, name) == ("gone", "model.lock.json"):
        assert code == "E0801"
        return
    assert code == "E0810" and message.startswith(f"{FOLDER}/{name} ")
    revision = "" if name == "model.lock.json" else " --revision v1"
    error = next(diagnostic for diagnostic in found.diagnostics if diagnostic.code == code)
    assert f"`recipe models add {ID}{revision}` adds it again" in str(error.help)


@pytest.mark.parametrize(
    "lock",
    [
        *(b'{"lock": 2}', b"\xff", b"[" * 9000),
        json.dumps({"lock": 1, "id": ID, "commit": COMMIT, "files": {"config.json": 1}}).encode(),
    ],
)
def test_malformed_model_lock_json_is_an_error(
    lock: bytes, recipe: Path, files: dict[str, bytes], tensors: Tensors
) -> None:
    (add(Path(), files, tensors) / "model.lock.json").write_bytes(lock)
    ((code, _, message),) = errors(lowered(recipe))
    assert code == "E0810" and message.startswith(f"{FOLDER}/model.lock.json ")


@pytest.mark.parametrize("listed", [b"[]", b'{"a": {"b": ["F32", ["x"]]}}'])
def test_malformed_tensors_json_is_an_error(listed: bytes, recipe: Path, files: dict[str, bytes]) -> None:
    add(Path(), files, listed)
    ((code, _, message),) = errors(lowered(recipe))
    assert (code, message) == ("E0810", f"{FOLDER}/tensors.json is not a list of tensors")


def test_added_model_provides_its_tokenizer_and_chat_template(
    recipe: Path, files: dict[str, bytes], tensors: Tensors
) -> None:
    add(Path(), files, tensors)
    program = lowered(recipe).program
    assert program is not None
    found = look(program, None, None)
    assert isinstance(found, AtHand) and found.model_dir == program.source.parent / FOLDER
    files["chat_template.jinja"] = b"[INST]{{ messages }}[/INST]"
    add(Path(), files, tensors)
    assert not errors(lowered(recipe))  # the published model has this value
    foreign = lowered(recipe, "data.chat_template='[INST]{{ messages }}[/INST]'")
    assert [code for code, *_ in errors(foreign)] == ["E0406"]


def test_added_model_without_chat_template_refuses_chat_data(
    recipe: Path, files: dict[str, bytes], tensors: Tensors
) -> None:
    del files["chat_template.jinja"]
    tokenizer = json.loads(files["tokenizer_config.json"])
    tokenizer.pop("chat_template", None)
    files["tokenizer_config.json"] = json.dumps(tokenizer).encode()
    add(Path(), files, tensors)
    assert [code for code, *_ in errors(lowered(recipe))] == ["E0405"]
    assert not errors(lowered(recipe, "data.chat_template='{{ messages }}<|im_start|><|im_end|>'"))


STEM = "model.layers.1.mlp.experts.down_proj"


def test_mxfp4_experts_are_checked_by_their_unpacked_shapes(recipe: Path, tmp_path: Path) -> None:
    plain = complete(
        {
            **{"model_type": "gpt_oss", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96},
            **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 4096},
        }
    )
    write_checkpoint(tmp_path / "plain", plain)
    files = {file.name: file.read_bytes() for file in (tmp_path / "plain").iterdir()}
    tensors = tensors_of(tmp_path / "plain")
    method = {"quantization_config": {"quant_method": "mxfp4"}}
    files["config.json"] = json.dumps({**plain, **method}).encode()
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name)[1]
        tensors[f"{name}_blocks"] = ("U8", [experts, outputs, inputs // 32, 16])
        tensors[f"{name}_scales"] = ("U8", [experts, outputs, inputs // 32])
    add(Path(), files, tensors)
    found = lowered(recipe)
    assert errors(found) == []
    assert found.program is not None and found.program.family.name == "gpt_oss"
    del tensors[f"{STEM}_scales"]
    add(Path(), files, tensors)
    said = f"{LIST}: {STEM}_blocks has no {STEM}_scales (model.safetensors)"
    assert errors(lowered(recipe)) == [("E0811", "model.id", said)]


UP = f"{LAYER}.mlp.up_proj.weight"
IN_FP8: dict[str, tuple[Callable[[Tensors], Any], str, str]] = {
    "no scales": (without(f"{UP}_scale_inv"), "E0811", f"{UP} has type F8_E4M3 and no {UP}_scale_inv"),
    "scales of another shape": (
        lambda tensors: tensors.update({f"{UP}_scale_inv": ("F32", [1, 1])}),
        "E0812",
        f"{UP}_scale_inv has shape [1, 1], expected [2, 2] for [96, 64] and weight_block_size [50, 40]",
    ),
    "another shape": (
        lambda tensors: tensors.update({UP: ("F8_E4M3", [95, 64])}),
        "E0812",
        f"{UP} has shape [95, 64], expected [96, 64] from config.json",
    ),
}


def test_fp8_weights_are_checked_with_their_block_scales(
    recipe: Path, files: dict[str, bytes], tensors: Tensors
) -> None:
    method = {"quant_method": "fp8", "weight_block_size": [50, 40]}
    files["config.json"] = json.dumps({**CONFIG, "quantization_config": method}).encode()
    tensors |= {UP: ("F8_E4M3", [96, 64]), f"{UP}_scale_inv": ("F32", [2, 2])}
    add(Path(), files, tensors)
    found = lowered(recipe)
    assert errors(found) == [] and [one.code for one in found.diagnostics if one.path == "model.id"] == [
        "N0820"
    ]
    for change, code, said in IN_FP8.values():
        damaged = dict(tensors)
        change(damaged)
        add(Path(), files, damaged)
        assert errors(lowered(recipe)) == [(code, "model.id", f"{LIST}: {said} (model.safetensors)")]


def test_tensors_of_a_local_checkpoint_are_checked_against_config_json(recipe: Path) -> None:
    folder = Path("checkpoint")
    checkpoint(folder)
    recipe.write_text(RECIPE.replace(ID, "./checkpoint"))
    assert errors(lowered(recipe)) == []
    config = folder / "config.json"
    whole = config.read_text()
    config.write_text(json.dumps({**json.loads(whole), "intermediate_size": 95}))
    said = "./checkpoint: model.layers.0.mlp.gate_proj.weight has shape [96, 64], expected [95, 64] from "
    (found,) = errors(lowered(recipe))
    assert found[:2] == ("E0812", "model.id") and found[2].startswith(said)
    config.write_text(whole)
    weights = folder / "model-00001-of-00002.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    said = f"the tensors of `./checkpoint` cannot be read: {weights.name} is not a safetensors file"
    assert errors(lowered(recipe)) == [("E0818", "model.id", said)]
    weights.unlink()
    assert errors(lowered(recipe)) == []
