"""Merged folders and PEFT adapters in the real vLLM server, held against transformers, both in float32.

The real Gemma 3 270M, as its recipe trains it, and a tiny Gemma 4 in the multimodal layout. vLLM's greedy
answers are compared by token ids, and the log probabilities of what it thought likeliest at every step.
The figures go to build/e2e/vllm.json; the servers' logs lie beside it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiler.miniature_tokenizer import MARKERS, write_tokenizer
from runtime import merge
from runtime.checkpoint import BaseCheckpoint
from runtime.settings import ModelSettings
from tests import tiny
from tests.e2e import vllm_cpu
from tests.e2e.gemma3 import Tuned
from tests.runtime.runs import lora_section, save_run

pytestmark = pytest.mark.e2e

NEW_TOKENS = 16
TOLERANCE = 1e-3
"""Between log probabilities; the largest difference seen was 2.4e-4."""
TIE = 2 * TOLERANCE
"""Where transformers' likeliest token and vLLM's are closer than this, either is right, and what follows is
not compared."""
TIES = 1
"""At most, among the answers of one model."""

MEDIA = {
    f"{name}_token_id": MARKERS["gemma4"].index(marker)
    for name, marker in {
        "boi": "<|image>",
        "image": "<|image|>",
        "eoi": "<image|>",
        "video": "<|video|>",
        "boa": "<|audio>",
        "audio": "<|audio|>",
    }.items()
}
"""The ids in config.json, of the tokenizer's own markers."""

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


@dataclass(frozen=True)
class Answer:
    """What a model says greedily to a prompt.

    Attributes:
        tokens: `NEW_TOKENS` ids, going on after an end of text.
        logprobs: at every step, by token id: the likeliest five of vLLM, all of transformers.
    """

    tokens: list[int]
    logprobs: Sequence[Mapping[int, float] | np.ndarray]


@dataclass(frozen=True)
class Merged:
    """A base, and a run's outcome in float32: the merged folder and the adapter.

    Attributes:
        prompts: token ids, of odd and different lengths.
        question: a user's turn.
        keys: another outcome on the same base, trained on k_proj alone.
    """

    base: Path
    merged: Path
    adapter: Path
    prompts: list[list[int]]
    question: str
    keys: tuple[Path, Path] | None = None


def merged_in_float32(base: Path, family: str, run: Path, folder: Path) -> tuple[Path, Path]:
    """The merged folder and the adapter's that merging a run writes into `folder`."""
    status = merge.main(
        folder,
        ModelSettings(id=str(base), family=family),
        checkpoint=str(run),
        output="merged",
        dtype="float32",
        adapter=True,
        argv=["--model", str(base), "--output", str(folder)],
    )
    assert status == 0
    return folder / "merged", folder / "merged-adapter"


@pytest.fixture(scope="module")
def gemma3(tuned: Tuned, questions: list[str], tmp_path_factory: pytest.TempPathFactory) -> Merged:
    """The real model: plain text that the training data is far from, and held-out questions."""
    from transformers import AutoTokenizer

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
    """A tiny one of random weights, in several files, with a run that was never run."""
    folder = tmp_path_factory.mktemp("gemma4")
    base = folder / "base"
    make_gemma4(base)
    opened = BaseCheckpoint.open(base)
    section = lora_section(rslora=True, rank_pattern={"o_proj": 5})
    save_run(folder / "run", opened, section, scale=0.1)
    save_run(folder / "keys", opened, lora_section(targets=["k_proj"]), scale=1.0)
    merged, adapter = merged_in_float32(base, "gemma4", folder / "run", folder / "out")
    keys = merged_in_float32(base, "gemma4", folder / "keys", folder / "out-keys")
    random = np.random.default_rng(0)
    lengths = (1, 3, 5, 9, 16, 23, 40, 61, 97, 131)
    prompts = [[2, *random.integers(30, 500, length).tolist()] for length in lengths]
    return Merged(base, merged, adapter, prompts, "What is the capital of France?", keys)


def make_gemma4(directory: Path) -> None:
    """A tiny Gemma 4 that vLLM loads, and whose answers are more than its prompts' last tokens."""
    import torch

    model = tiny.make_gemma4(
        directory.with_name("small"),
        vocab_size=512,
        vocab_size_per_layer_input=512,
        head_dim=32,
        global_head_dim=64,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # What the layers add outweighs the embedding, which by itself says the last token again.
            if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
                parameter.mul_(8)
        # What stands for images and sounds is never said: transformers would take what it said itself for
        # the place of an image that is not there.
        model.get_input_embeddings().weight[[*MEDIA.values()]] = 0
    for name, token in MEDIA.items():
        setattr(model.config, name, token)
    model.config.vision_config.default_output_length = 280
    model.save_pretrained(directory, max_shard_size="1MB")
    write_tokenizer(directory, "gemma4")


class References:
    """What transformers says, each computed when it is first asked for."""

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
    """What vLLM says: the merged folder, then the base and its adapters, by the names they are served by."""

    seconds: list[float]
    merged: list[Answer]
    chat: dict[str, Any]
    base: list[Answer]
    adapters: dict[str, list[Answer]]


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
    """Everything that is asked of the two servers of a case, one after the other."""
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
    with vllm_cpu.serve(case.base, f"{name}-base", adapters=adapters) as server:
        seconds.append(server.seconds)
        base = asked(server, "base", case.prompts)
        answers = {served: asked(server, served, case.prompts) for served in adapters}
    return Served(seconds, merged, chat, base, answers)


@pytest.fixture(scope="module")
def report(root: Path) -> Iterator[dict[str, Any]]:
    """Figures by what was compared."""
    figures: dict[str, Any] = {}
    yield figures
    path = root / "build" / "e2e" / "vllm.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=2))


def load(directory: Path) -> Any:
    """transformers' model of a folder, of the class that its config.json names, in float32."""
    import torch
    import transformers

    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    torch.set_num_threads(1 if size < 100e6 else os.cpu_count() or 1)
    config = json.loads((directory / "config.json").read_text("utf-8"))
    build = getattr(transformers, config["architectures"][0])
    return build.from_pretrained(directory, dtype=torch.float32).eval()


def with_peft(base: Path, adapter: Path) -> Any:
    import peft

    return peft.PeftModel.from_pretrained(load(base), adapter).eval()


def said(model: Any, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """transformers' answers, one prompt at a time."""
    import torch

    model.generation_config.eos_token_id = None
    out = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logprobs = torch.cat(made.logits).float().log_softmax(-1).numpy()
        out.append(Answer(made.sequences[0, len(prompt) :].tolist(), logprobs))
    return out


def asked(server: vllm_cpu.Server, model: str, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """vLLM's answers, to all prompts in one request."""
    body = {
        "model": model,
        "prompt": prompts,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 5,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    choices = sorted(server.post("/v1/completions", body)["choices"], key=lambda choice: choice["index"])
    assert [choice["prompt_token_ids"] for choice in choices] == list(prompts)
    return [
        Answer(
            choice["token_ids"],
            [
                {int(token.removeprefix("token_id:")): value for token, value in step.items()}
                for step in choice["logprobs"]["top_logprobs"]
            ],
        )
        for choice in choices
    ]


def agreement(answers: Sequence[Answer], wanted: Sequence[Answer]) -> dict[str, Any]:
    """How vLLM's answers agree with transformers', all of them, but for `TIES`.

    Returns:
        The number of answers; that of ties; and the largest difference between log probabilities, at all
        steps up to an answer's first tie.
    """
    ties = 0
    largest = 0.0
    for number, (answer, want) in enumerate(zip(answers, wanted, strict=True)):
        assert len(answer.tokens) == len(want.tokens) == NEW_TOKENS
        for step, (token, expected) in enumerate(zip(answer.tokens, want.tokens, strict=True)):
            logprobs = want.logprobs[step]
            differences = [abs(value - logprobs[i]) for i, value in answer.logprobs[step].items()]
            largest = max(largest, *map(float, differences))
            if token != expected:
                margin = logprobs[expected] - logprobs[token]
                assert margin < TIE, f"prompt {number}, step {step}: {token} for {expected}, by {margin}"
                ties += 1
                break
    assert largest < TOLERANCE
    assert ties <= TIES
    return {"answers": len(answers), "ties": ties, "largest_logprob_difference": float(f"{largest:.2g}")}


def tokens(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def differing(one: Sequence[Answer], other: Sequence[Answer]) -> float:
    """The share of answers that differ."""
    return sum(a != b for a, b in zip(tokens(one), tokens(other), strict=True)) / len(one)


def test_the_merged_folder_answers_as_in_transformers(
    name: str, served: Served, references: References, report: dict[str, Any]
) -> None:
    report[f"{name}: seconds to start the merged model, and the base with adapters"] = [
        round(second) for second in served.seconds
    ]
    report[f"{name}: merged"] = agreement(served.merged, references.merged)


def test_the_adapter_answers_as_the_merged_folder(
    name: str, served: Served, references: References, report: dict[str, Any]
) -> None:
    """In vLLM beside the base, and in PEFT; the base by itself stays as it is."""
    report[f"{name}: adapter against merged"] = agreement(served.adapters["adapter"], references.merged)
    report[f"{name}: adapter against PEFT"] = agreement(served.adapters["adapter"], references.adapter)
    report[f"{name}: base"] = agreement(served.base, references.base)


def test_the_adapter_changes_the_answers(served: Served, references: References) -> None:
    assert differing(served.merged, served.base) >= 0.5
    assert differing(served.adapters["adapter"], served.base) >= 0.5
    assert differing(references.adapter, references.base) >= 0.5


def test_the_answers_are_worth_comparing(references: References) -> None:
    """They do not say one token over and over."""
    assert np.mean([len(set(answer)) for answer in tokens(references.merged)]) >= 6


def test_a_chat_goes_through_the_merged_folders_template(case: Merged, served: Served) -> None:
    from transformers import AutoTokenizer

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
    # vLLM keeps back a character whose last bytes have not come.
    text = tokenizer.decode(answer, skip_special_tokens=True).rstrip("\N{REPLACEMENT CHARACTER}")
    assert choice["message"]["content"].rstrip("\N{REPLACEMENT CHARACTER}") == text


@pytest.mark.parametrize("name", ["gemma4"], indirect=True, scope="module")
def test_keys_that_are_values_too(
    name: str, served: Served, references: References, report: dict[str, Any]
) -> None:
    """Gemma 4's global layers have one matrix for both, which merging changes for both.

    vLLM 0.32.0 keeps it twice, as k_proj and as v_proj, and adds an adapter of k_proj to the first alone: the
    export names it twice. When the second half fails, vLLM has mended that, and the export need not.
    """
    report[f"{name}: keys and values"] = agreement(served.adapters["keys"], references.keys)
    with pytest.raises(AssertionError):
        agreement(served.adapters["keys-alone"], references.keys)


def leave_out_the_values(adapter: Path, directory: Path) -> None:
    """Writes an adapter of k_proj without its copies for v_proj in the layer that has no v_proj, the last."""
    from safetensors.numpy import load_file, save_file

    arrays = load_file(adapter / "adapter_model.safetensors")
    kept = {name: array for name, array in arrays.items() if ".v_proj." not in name}
    assert len(arrays) - len(kept) == 2
    save_file(kept, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
