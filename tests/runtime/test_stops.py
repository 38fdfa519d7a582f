"""Tests that a base model, trained to answer, stops by itself, though its base has another end token.

It stops in the samples of its run, in transformers with the merged folder, and in `recipe chat` with the
adapter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from recipec.compiler.trained.chat import Options, Talk
from recipec.runtime.merging import merge
from recipec.runtime.settings import ModelSettings
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests.runtime.artifacts import environment, train, write_artifact, write_place
from tests.runtime.lives import Lives
from tests.runtime.runs import lora_section, write_lock

pytestmark = pytest.mark.e2e

STEPS, MOST = 20, 24
QUESTION = [{"role": "user", "content": "one two three"}]
PRELUDE = f"""
from dataclasses import replace

from runtime.sections import Generations

LORA = replace(LORA, rank=8, alpha=16.0, dropout=0.0)
DATA = replace(DATA, eval=("train.jsonl",), max_length=48)
TRAIN = replace(TRAIN, eval_every={STEPS}, generations=Generations("prompts.jsonl", {MOST}))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a base model, which ends at <eos>, with a chat template that ends a turn with another token."""
    place = tmp_path_factory.mktemp("stops")
    write_place(place)
    base = json.loads((place / "model" / "generation_config.json").read_text())
    assert len(base["eos_token_id"]) == 2, "as of a tuned model"
    end = base["eos_token_id"].pop()
    (place / "model" / "generation_config.json").write_text(json.dumps(base | {"max_new_tokens": 2048}))
    (place / "end").write_text(str(end))
    for file in (place / "model").glob("*.safetensors"):
        arrays = load_file(file)
        for name, array in arrays.items():
            if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
                arrays[name] = array + 7  # otherwise the embedding repeats the last token
        save_file(arrays, file, metadata={"format": "pt"})
    answer = {"role": "assistant", "content": "seven"}
    (place / "train.jsonl").write_text(f"{json.dumps({'messages': [*QUESTION, answer]})}\n" * 16)
    (place / "prompts.jsonl").write_text(json.dumps({"messages": QUESTION}) + "\n")
    write_artifact(place / "base", rate=1e-2, steps=STEPS, every=STEPS, prelude=PRELUDE)
    targets = ["q_proj", "v_proj", "down_proj"]
    write_lock(
        place / "base", HFCheckpoint.open(place / "model"), lora_section(rank=8, alpha=16.0, targets=targets)
    )
    life = train(Lives(environment(place), place), place, "run", artifact="base")
    assert life.status == 0, life.stderr
    status = merge.main(
        place / "base",
        ModelSettings(id="base", family="gemma4"),
        checkpoint=str(place / "run" / "checkpoints"),
        output="merged",
        dtype="float32",
        adapter=True,
        argv=["--model", str(place / "model"), "--output", str(place)],
    )
    assert status == 0
    return place


def end_of(place: Path) -> int:
    return int((place / "end").read_text())


def answer_of(model: Path, **options: Any) -> list[int]:
    """Return the tokens of transformers' own greedy answer."""
    import transformers

    made = transformers.AutoTokenizer.from_pretrained(model)
    loaded: Any = transformers.AutoModelForImageTextToText.from_pretrained(model)
    asked = made.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    out = loaded.generate(**asked, max_new_tokens=MOST, do_sample=False, **options)
    return out[0, asked["input_ids"].shape[1] :].tolist()


def test_run_records_its_end_and_its_samples_stop_there(place: Path) -> None:
    facts = json.loads((place / "run" / "checkpoints" / "run.json").read_text())
    assert facts["data"]["train"]["ends"] == {str(end_of(place)): 16}
    lines = (place / "run" / "checkpoints" / "generations.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert (last["step"], last["answer"], last["ended"]) == (STEPS, "seven", True)


def test_merged_model_stops_by_itself(place: Path) -> None:
    base, merged = (
        json.loads((place / name / "generation_config.json").read_text()) for name in ("model", "merged")
    )
    assert merged == base | {"eos_token_id": [*base["eos_token_id"], end_of(place)]}
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (place / "merged" / name).read_bytes() == (place / "model" / name).read_bytes()
    answer = answer_of(place / "merged")
    assert answer[-1] == end_of(place) and len(answer) < MOST
    # With the end tokens of the base it would go on.
    longer = answer_of(place / "merged", eos_token_id=base["eos_token_id"])
    assert longer[: len(answer)] == answer and len(longer) > len(answer)


def test_adapter_brings_the_end_and_chat_stops_there(place: Path) -> None:
    beside = json.loads((place / "merged-adapter" / "generation_config.json").read_text())
    merged = json.loads((place / "merged" / "generation_config.json").read_text())
    assert beside == {name: value for name, value in merged.items() if name != "max_new_tokens"}
    record = json.loads((place / "merged-adapter" / "merge.json").read_text())
    assert "generation_config.json" in record["files"] and record["identity"]["ends"] == [end_of(place)]
    said: list[str] = []
    for folder, base in (("merged", None), ("merged-adapter", str(place / "model"))):
        talk = Talk(place / folder, Options(base=base, max_tokens=MOST, temperature=0), said.append)
        assert talk.answer("one two three") == "seven", folder
