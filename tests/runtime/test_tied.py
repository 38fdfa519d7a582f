"""Tests of output heads: whether one is the embedding is decided as in transformers, and what a merge writes
answers the same as a merged folder in transformers and as an adapter in PEFT."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from recipec.compiler import catalog
from recipec.compiler.lower import lower
from recipec.runtime.checkpoints.record import read_record
from recipec.runtime.checkpoints.resuming import describe
from recipec.runtime.checkpoints.saving import Checkpoints, StepArrays
from recipec.runtime.checkpoints.trained_weights import check_model
from recipec.runtime.errors import UserError
from recipec.runtime.merging import merge, verify
from recipec.runtime.merging.tensor_samples import Sampled
from recipec.runtime.merging.verify import logits, token_rows
from recipec.runtime.model.families.description import DecoderArchitecture
from recipec.runtime.model.families.family import TIE, tie_setting
from recipec.runtime.model.loading import build
from recipec.runtime.model.sharding import start_mesh
from recipec.runtime.peft.importing import import_adapter
from recipec.runtime.settings import MeshSettings, ModelSettings
from recipec.runtime.weights.agreement import untied
from recipec.runtime.weights.checkpoint import HFCheckpoint
from recipec.spec.load import load as load_recipe
from tests import tiny
from tests.runtime import decoders, training
from tests.runtime.runs import lora_section, save_run, write_lock
from tests.runtime.torch_models import in_float64, make_gemma3_multimodal, torch_logits

pytestmark = pytest.mark.usefixtures("compiled_once")

LIMIT = 2e-5
"""The tolerance for logits, as a share of the largest."""
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
MESH = {"fsdp": 2, "tp": 2}
BASES: dict[str, Any] = {
    "tied": partial(tiny.make_qwen3, num_hidden_layers=1),
    "untied": partial(tiny.make_qwen3, num_hidden_layers=1, tie_word_embeddings=False),
    "falcon": partial(decoders.make, "falcon"),
    "multimodal": partial(make_gemma3_multimodal, layers=1),
}
"""Models with a tied head and one without. PEFT does not know the second tied one's embedding by its name."""


def with_head(base: Path, folder: Path, head: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Write a copy of a checkpoint with a head in a file of its own, as FSDP and DeepSpeed save it."""
    shutil.copytree(base, folder)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / first)
    save_file({HEAD: head(tensors[EMBEDDING]).contiguous()}, folder / second, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {**dict.fromkeys(tensors, first), HEAD: second}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that makes a base once by its name: one of BASES, or "tied" with a head in its files,
    which has the embedding's values (copied) or others (own)."""

    @cache
    def of(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name) / "base"
        if name in BASES:
            BASES[name](folder)
        else:
            with_head(of("tied"), folder, torch.clone if name == "copied" else partial(torch.flip, dims=(0,)))
        return folder

    return of


def load(folder: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder)
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32)


def rows() -> dict[str, np.ndarray]:
    return token_rows(500, 1)


def answers(model: Any) -> np.ndarray:
    return torch_logits(in_float64(model), rows())


def settings_of(folder: Path) -> ModelSettings:
    return ModelSettings(id=str(folder), family=HFCheckpoint.open(folder).family.name, dtype="float32")


def run_merge(folder: Path, base: Path, *argv: str, adapter: bool = True) -> int:
    return merge.main(
        folder,
        settings_of(base),
        checkpoint=str(folder / "run"),
        output="merged",
        dtype="float32",
        adapter=adapter,
        argv=list(argv),
    )


def as_vllm(folder: Path) -> np.ndarray:
    """Return the logits of a merged folder if the head is chosen by config.json alone."""
    config = json.loads((folder / "config.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    model = load(folder)
    embedding = next(name for name in tensors if re.search(r"(embed_tokens|word_embeddings)\.weight$", name))
    with torch.no_grad():
        model.lm_head.weight.copy_(tensors[embedding if tie_setting(config) is not False else HEAD])
    return answers(model)


def differs(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max() / np.abs(other).max())


ALSO = [
    *((name, also) for name in ("tied", "copied") for also in ([], ["embed_tokens"], ["norm"])),
    *((name, also) for name in ("untied", "own") for also in (["embed_tokens"], ["lm_head"])),
    *((name, ["embed_tokens", "lm_head", "norm"]) for name in ("untied", "own")),
    ("falcon", ["word_embeddings"]),
    ("multimodal", ["embed_tokens", r"layers\.0\..*norm"]),
]


@pytest.mark.parametrize(("name", "also"), ALSO, ids=str)
def test_merged_folder_and_adapter_answer_the_same(
    name: str, also: list[str], bases: Callable[[str], Path], tmp_path: Path
) -> None:
    """Compare transformers on the merged folder, a server's rule, and PEFT, before and after its own merge;
    then import the adapter again."""
    base = HFCheckpoint.open(bases(name))
    section = lora_section(
        targets=["q_proj" if name != "falcon" else "query_key_value"], modules_to_save=also
    )
    save_run(tmp_path / "run", base, section)
    assert run_merge(tmp_path, bases(name)) == 0
    merged = answers(load(tmp_path / "merged"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if name == "own":  # as config.json says
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
        wrapped = peft.PeftModel.from_pretrained(load(bases(name)), tmp_path / "merged-adapter")
    adapted, by_peft = answers(wrapped), answers(wrapped.merge_and_unload())
    found = [differs(one, merged) for one in (adapted, by_peft, as_vllm(tmp_path / "merged"))]
    print(f"\n{name}, {also}: {', '.join(f'{one:.1e}' for one in found)}")
    assert max(found) <= LIMIT
    assert differs(answers(load(bases(name))), merged) > 0.01, "training changes the answers"

    write_lock(tmp_path / "artifact", base, section)
    import_adapter(tmp_path / "merged-adapter", base, tmp_path / "artifact", tmp_path / "again" / "run")
    assert run_merge(tmp_path / "again", bases(name)) == 0
    kept = HFCheckpoint.open(tmp_path / "merged").headers
    for file in kept:
        assert (tmp_path / "again/merged" / file).read_bytes() == (tmp_path / "merged" / file).read_bytes()


TOGETHER = "train with PEFT's ensure_weight_tying"
SAVED: list[tuple[str, list[str], bool, str]] = [
    ("tied", ["norm"], False, ""),
    ("tied", ["embed_tokens"], False, "embed_tokens was trained, and lm_head kept the base's values"),
    ("tied", ["lm_head"], False, "lm_head was trained, and embed_tokens was not"),
    ("tied", ["embed_tokens", "lm_head"], False, "embed_tokens and lm_head were trained apart"),
    ("tied", ["embed_tokens"], True, ""),
    ("tied", ["embed_tokens", "lm_head"], True, ""),
    ("copied", ["embed_tokens"], True, ""),
    ("untied", ["embed_tokens"], False, ""),
    ("untied", ["lm_head"], False, ""),
    ("own", ["embed_tokens"], False, ""),
    ("own", ["embed_tokens", "lm_head"], False, ""),
]


@pytest.mark.parametrize(("name", "modules", "tied", "refused"), SAVED, ids=str)
def test_adapter_of_peft_answers_as_there_or_is_refused(
    name: str, modules: list[str], tied: bool, refused: str, bases: Callable[[str], Path], tmp_path: Path
) -> None:
    """Save an adapter with random modules_to_save with PEFT, import it, and merge it."""
    base = HFCheckpoint.open(bases(name))
    config = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=["q_proj"], modules_to_save=modules, ensure_weight_tying=tied
    )
    wrapped = peft.get_peft_model(load(bases(name)), config)
    generator = torch.Generator().manual_seed(1)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    expected = answers(wrapped)
    wrapped.float().save_pretrained(str(tmp_path / "adapter"))
    also = ["embed_tokens"] if tied or refused else [name.replace("norm", ".*norm") for name in modules]
    section = lora_section(targets=["q_proj"], modules_to_save=also)
    write_lock(tmp_path / "artifact", base, section)
    if refused:
        with pytest.raises(UserError) as caught:
            import_adapter(tmp_path / "adapter", base, tmp_path / "artifact", tmp_path / "run")
        assert refused in caught.value.message and str(caught.value.help).startswith(TOGETHER)
        return
    import_adapter(tmp_path / "adapter", base, tmp_path / "artifact", tmp_path / "run")
    assert run_merge(tmp_path, bases(name), adapter=False) == 0
    assert differs(answers(load(tmp_path / "merged")), expected) <= LIMIT


def test_head_of_other_values_is_computed_as_in_transformers(
    bases: Callable[[str], Path], tmp_path: Path
) -> None:
    base = HFCheckpoint.open(bases("own"))
    built = build(base, settings_of(bases("own")), None, mesh := start_mesh(MeshSettings("cpu", 4, MESH)))
    found, expected = logits(built, rows(), mesh), answers(load(bases("own")))
    assert differs(found, expected) <= LIMIT
    assert differs(answers(load(bases("tied"))), expected) > 0.1, "the head matters"
    for name, tied in (("tied", True), ("copied", True), ("own", False)):
        read = HFCheckpoint.open(bases(name)).architecture
        assert isinstance(read, DecoderArchitecture) and read.tied is tied
        assert catalog.find(f"./{bases(name).name}", bases(name).parent).architecture == read
    assert HFCheckpoint.open(bases("copied")).config_file() == (bases("copied") / "config.json").read_bytes()


RECIPE = """
recipe: 1
name: tied
model: {id: ./base}
mesh: {accelerator: cpu-1, axes: {fsdp: 1, tp: 1}}
lora: {rank: 2, targets: [q_proj]}
data: {train: [train.jsonl], format: text, max_length: 64}
train: {epochs: 1, global_batch_size: 1}
checkpoint: {directory: run}
serve: {accelerator: v6e-1, tensor_parallel_size: 1}
"""


def test_check_says_what_a_head_of_other_values_means(bases: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)

    def codes(name: str, *sets: str) -> set[str]:
        (tmp_path / "base").unlink(missing_ok=True)
        (tmp_path / "base").symlink_to(bases(name))
        return {one.code for one in lower(load_recipe(tmp_path / "recipe.yaml", sets)).diagnostics}

    rows, adapter = "lora.trainable_tokens=[3]", "serve.weights=adapter"
    for name in ("tied", "copied"):
        assert not codes(name, rows, adapter) & {"N0821", "E0326", "E0663"}
        assert "E0322" in codes(name, "lora.modules_to_save=[lm_head]")
    assert {"E0326", "E0663"} <= codes("own", rows, adapter) and "N0821" in codes("own")
    assert not codes("own", rows, "merge.adapter=false") & {"E0326", "E0663"}
    assert "E0322" not in codes("own", "lora.modules_to_save=[lm_head]")


@pytest.mark.e2e
def test_full_fine_tuning_writes_a_repeated_head_too(
    bases: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Merge a run over all weights. Then put the base's head back: --verify finds it by the logits alone."""
    base = HFCheckpoint.open(bases("copied"))
    tiny.make_qwen3(tmp_path / "trained", num_hidden_layers=1, seed=1)
    mesh, built = training.build(tmp_path / "trained", MESH, full=True)
    with mesh:
        checkpoints = Checkpoints(str(tmp_path / "run"), keep=1)
        checkpoints.write(3, StepArrays(built.model, None, lora_only=False), describe({}))
        checkpoints.finish()
    write_lock(tmp_path / "run", base, None)
    assert run_merge(tmp_path, bases("copied"), "--verify", adapter=False) == 0
    folder = tmp_path / "merged"
    found, expected = answers(load(folder)), answers(load(tmp_path / "trained"))
    assert np.array_equal(found, expected)
    merged = HFCheckpoint.open(folder)
    assert merged.read(HEAD).tobytes() == merged.read(EMBEDDING).tobytes()

    file = merged.tensors[HEAD].file
    held = load_file(folder / file)
    save_file({**held, HEAD: torch.tensor(np.array(base.read(HEAD)))}, folder / file, {"format": "pt"})
    capsys.readouterr()
    monkeypatch.setattr(verify, "check_files", lambda *arguments: 0)
    assert verified(base, tmp_path) == 1
    assert f"{HEAD} is not what was trained" in capsys.readouterr().err
    monkeypatch.setattr(verify, "check_tensors", lambda *arguments: Sampled())
    assert verified(base, tmp_path) == 1
    assert "is not what was trained: logits differ by" in capsys.readouterr().err


def verified(base: HFCheckpoint, folder: Path) -> int:
    """Verify a merged folder as it is."""
    return run_merge(folder, Path(base.name), "--verify", adapter=False)


def test_checkpoint_of_another_tie_than_compiled_is_refused(
    bases: Callable[[str], Path], tmp_path: Path
) -> None:
    write_lock(tmp_path, HFCheckpoint.open(bases("tied")), None)
    own = HFCheckpoint.open(bases("own"))
    with pytest.raises(UserError, match=r"lm_head.weight has other values than the embedding") as caught:
        check_model(read_record(tmp_path), own)
    assert f"set {TIE} to false in {own.name}/config.json" in str(caught.value.help)
    check_model(read_record(tmp_path), HFCheckpoint.open(bases("copied")))


def test_rows_in_a_head_of_other_values_are_not_exported(
    bases: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = HFCheckpoint.open(bases("own"))
    save_run(tmp_path / "run", base, lora_section(targets=["q_proj"], trainable_tokens=[3, 7]))
    assert run_merge(tmp_path, bases("own")) == 1
    assert "PEFT puts the rows of trainable_tokens into lm_head.weight too" in capsys.readouterr().err
    assert run_merge(tmp_path, bases("own"), adapter=False) == 0


def test_gemma_with_a_head_of_its_own_is_untied(tmp_path: Path) -> None:
    tiny.make_gemma3(tmp_path / "gemma", num_hidden_layers=1)
    with_head(tmp_path / "gemma", tmp_path / "base", partial(torch.flip, dims=(0,)))
    assert HFCheckpoint.open(tmp_path / "base").own_head == "lm_head.weight"
    assert catalog.find("./base", tmp_path).own_head == "lm_head.weight"


@pytest.mark.parametrize(
    ("kind", "whole", "text", "tied"),
    [
        ("mistral3", True, False, True),
        ("mistral3", False, True, False),
        ("llava", False, True, True),
        ("llava", None, False, False),
        ("qwen3_5", None, True, True),
        ("qwen3_5", None, None, None),
    ],
)
def test_whole_model_says_whether_the_head_is_tied(
    kind: str, whole: bool | None, text: bool | None, tied: bool | None
) -> None:
    given: dict[str, Any] = {"model_type": kind, "text_config": {} if text is None else {TIE: text}}
    given |= {} if whole is None else {TIE: whole}
    assert tie_setting(given) is tied
    if None not in (whole, tied):
        from transformers import AutoConfig

        assert AutoConfig.for_model(**given).tie_word_embeddings is tied
    assert tie_setting(untied(given)) is False and untied(given)["text_config"][TIE] is False
