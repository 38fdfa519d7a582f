"""Tests of merged folders and PEFT adapters in the real vLLM server, against transformers, in float32.

The models are the real Gemma 3 270M, trained by its recipe, and a tiny Gemma 4 in the multimodal layout. The
tests compare greedy answers by token ids, and the log probabilities of vLLM's likeliest tokens at every step.
The figures are written to build/e2e/vllm.json, and the servers' logs next to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests.e2e import vllm_cpu
from tests.e2e.gemma3 import Tuned
from tests.e2e.greedy import NEW_TOKENS, Answer, agreement, asked, differing, load, said, tokens, with_peft
from tests.e2e.merged_models import Merged, make_gemma4, merged_in_float32
from tests.runtime.runs import lora_section, save_run

pytestmark = pytest.mark.e2e

PLAIN = (
    "Paris",
    "The opposite of hot is",
    "Water boils at one hundred degrees, and",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time there was a baker who kneaded the dough, waited an hour, shaped twelve loaves and "
    "lit her oven; and each morning, when the bells rang, the whole street came to her door. "
    * 4
    + "One day",
)


@pytest.fixture(scope="module")
def gemma3(tuned: Tuned, questions: list[str], tmp_path_factory: pytest.TempPathFactory) -> Merged:
    """Make the real model's case: plain text unlike the training data, and held-out questions."""
    tokenizer = AutoTokenizer.from_pretrained(tuned.base)
    turns = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )
        for text in questions[:5]
    ]
    prompts = [*(tokenizer(text)["input_ids"] for text in PLAIN), *(turn["input_ids"] for turn in turns)]
    merged, adapter = merged_in_float32(
        tuned.base, "gemma3", tuned.run / "checkpoints", tmp_path_factory.mktemp("gemma3")
    )
    return Merged(tuned.base, merged, adapter, prompts, questions[5])


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Merged:
    """Make a tiny model of random weights, in several files, with a made-up run."""
    folder = tmp_path_factory.mktemp("gemma4")
    base = folder / "base"
    make_gemma4(base)
    opened = HFCheckpoint.open(base)
    section = lora_section(rslora=True, rank_pattern={"o_proj": 5})
    save_run(folder / "run", opened, section, scale=0.1)
    random = np.random.default_rng(0)
    lengths = (1, 3, 5, 9, 16, 23, 40, 61, 97, 131)
    prompts = [[2, *random.integers(30, 500, length).tolist()] for length in lengths]
    # The run's data is said to end answers with a token that comes within one of the answers.
    first, _ = merged_in_float32(base, "gemma4", folder / "run", folder / "first")
    answers = tokens(said(load(first), prompts))
    number, answer = max(enumerate(answers), key=lambda one: len(set(one[1])))
    end = next(token for token in answer[3:12] if answer.index(token) >= 3)
    facts = {"data": {"train": {"ends": {str(end): 1}}}}
    (folder / "run" / "run.json").write_text(json.dumps(facts))
    save_run(folder / "keys", opened, lora_section(targets=["k_proj"]), scale=1.0)
    merged, adapter = merged_in_float32(base, "gemma4", folder / "run", folder / "out")
    keys = merged_in_float32(base, "gemma4", folder / "keys", folder / "out-keys")
    expected = answer[: answer.index(end) + 1]
    question = "What is the capital of France?"
    return Merged(base, merged, adapter, prompts, question, keys, (prompts[number], expected))


class References:
    """transformers' answers, computed on first use."""

    def __init__(self, case: Merged) -> None:
        self.case = case

    @cached_property
    def base(self) -> list[Answer]:
        return said(load(self.case.base), self.case.prompts)

    @cached_property
    def merged(self) -> list[Answer]:
        return said(load(self.case.merged), self.case.prompts)

    @cached_property
    def adapter(self) -> list[Answer]:
        return said(with_peft(self.case.base, self.case.adapter), self.case.prompts)

    @cached_property
    def keys(self) -> list[Answer]:
        assert self.case.keys is not None
        return said(load(self.case.keys[0]), self.case.prompts)


@dataclass(frozen=True)
class Served:
    """vLLM's answers: of the merged folder, and of the base and its adapters by their served names."""

    seconds: list[float]
    merged: list[Answer]
    chat: dict[str, Any]
    base: list[Answer]
    adapters: dict[str, list[Answer]]
    ended: dict[str, Any]


@pytest.fixture(scope="module", params=["gemma3", "gemma4"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def case(name: str, request: pytest.FixtureRequest) -> Merged:
    return request.getfixturevalue(name)


@pytest.fixture(scope="module")
def references(case: Merged) -> References:
    return References(case)


@pytest.fixture(scope="module")
def served(name: str, case: Merged, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Collect all answers of a case's two servers, which run one after the other."""
    adapters = {"adapter": case.adapter}
    if case.keys is not None:
        adapters |= {"keys": case.keys[1], "keys-alone": tmp_path_factory.mktemp("adapter")}
        leave_out_the_values(case.keys[1], adapters["keys-alone"])
    with vllm_cpu.serve(case.merged, f"{name}-merged") as server:
        seconds = [server.seconds]
        merged = asked(server, "base", case.prompts)
        turn = {"role": "user", "content": case.question}
        chat = server.post(
            "/v1/chat/completions",
            {"model": "base", "messages": [turn], "max_tokens": NEW_TOKENS, "temperature": 0}
            | {"return_token_ids": True},
        )
        ended = {"merged": until_the_end(server, "base", case)}
    # As the artifact's server of an adapter: it takes the end tokens from the adapter's folder.
    place = ("--generation-config", str(case.adapter))
    with vllm_cpu.serve(case.base, f"{name}-base", *place, adapters=adapters) as server:
        seconds.append(server.seconds)
        ended["adapter"] = until_the_end(server, "adapter", case)
        base = asked(server, "base", case.prompts)
        answers = {served: asked(server, served, case.prompts) for served in adapters}
    return Served(seconds, merged, chat, base, answers, ended)


def until_the_end(server: vllm_cpu.Server, model: str, case: Merged) -> Any:
    """Return the answer that ends before the limit, None if the case has none."""
    if case.ended is None:
        return None
    body = {"model": model, "prompt": case.ended[0], "max_tokens": NEW_TOKENS, "temperature": 0}
    (choice,) = server.post("/v1/completions", body | {"return_token_ids": True})["choices"]
    return choice["finish_reason"], choice["token_ids"]


@pytest.fixture(scope="module")
def report(root: Path) -> Iterator[dict[str, Any]]:
    """Collect figures by what was compared, and write them."""
    figures: dict[str, Any] = {}
    yield figures
    path = root / "build" / "e2e" / "vllm.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=2))


def test_vllm_and_transformers_agree_on_the_merged_folder(
    name: str, served: Served, references: References, report: dict[str, Any]
) -> None:
    report[f"{name}: seconds to start the merged model, and the base with adapters"] = [
        round(second) for second in served.seconds
    ]
    report[f"{name}: merged"] = agreement(served.merged, references.merged)


def test_vllm_adapter_agrees_with_merged_folder_and_peft(
    name: str, served: Served, references: References, report: dict[str, Any]
) -> None:
    """Check the adapter's answers in vLLM next to the base, and in PEFT. The base's answers do not change."""
    report[f"{name}: adapter against merged"] = agreement(served.adapters["adapter"], references.merged)
    report[f"{name}: adapter against PEFT"] = agreement(served.adapters["adapter"], references.adapter)
    report[f"{name}: base"] = agreement(served.base, references.base)


def test_adapter_changes_at_least_half_of_the_answers(served: Served, references: References) -> None:
    assert differing(served.merged, served.base) >= 0.5
    assert differing(served.adapters["adapter"], served.base) >= 0.5
    assert differing(references.adapter, references.base) >= 0.5


def test_reference_answers_have_varied_tokens(references: References) -> None:
    """Check that the answers do not repeat one token."""
    assert np.mean([len(set(answer)) for answer in tokens(references.merged)]) >= 6


def test_chat_request_uses_the_merged_folders_chat_template(case: Merged, served: Served) -> None:
    tokenizer = AutoTokenizer.from_pretrained(case.merged)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": case.question}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    prompt = inputs["input_ids"][0].tolist()
    made = load(case.merged).generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    answer = made[0, len(prompt) :].tolist()
    (choice,) = served.chat["choices"]
    assert served.chat["prompt_token_ids"] == prompt
    assert choice["token_ids"] == answer
    # vLLM holds back an incomplete character.
    text = tokenizer.decode(answer, skip_special_tokens=True).rstrip("\N{REPLACEMENT CHARACTER}")
    assert choice["message"]["content"].rstrip("\N{REPLACEMENT CHARACTER}") == text


@pytest.mark.parametrize("name", ["gemma4"], indirect=True, scope="module")
def test_vllm_matches_transformers_for_a_k_proj_adapter_with_shared_kv(
    name: str, served: Served, references: References, report: dict[str, Any]
) -> None:
    """Test Gemma 4's global layers, which have one matrix for keys and values; merging changes both.

    vLLM 0.32.0 stores the matrix twice, as k_proj and as v_proj, and adds an adapter of k_proj only to the
    first. So the export names it twice. When the second half of this test fails, vLLM has fixed this, and the
    export can stop doing so.
    """
    report[f"{name}: keys and values"] = agreement(served.adapters["keys"], references.keys)
    with pytest.raises(AssertionError):
        agreement(served.adapters["keys-alone"], references.keys)


@pytest.mark.parametrize("name", ["gemma4"], indirect=True, scope="module")
def test_vllm_stops_at_the_token_that_ends_answers_in_training(
    name: str, case: Merged, served: Served
) -> None:
    """The base has other end tokens. The merged folder brings the run's, and so does the adapter's folder."""
    assert case.ended is not None
    expected = ("stop", case.ended[1])
    assert len(case.ended[1]) < NEW_TOKENS
    assert served.ended == {"merged": expected, "adapter": expected}


def leave_out_the_values(adapter: Path, directory: Path) -> None:
    """Write an adapter of k_proj without its v_proj copies in the last layer, which has no v_proj."""
    arrays = load_file(adapter / "adapter_model.safetensors")
    kept = {name: array for name, array in arrays.items() if ".v_proj." not in name}
    assert len(arrays) - len(kept) == 2
    save_file(kept, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
