"""Tests of clients that answer from a folder of weights, without a server: as transformers' generate."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipec.compiler.miniature.small_checkpoint import write_tokenizer
from recipec.runtime.clients import evaluate, smoke
from recipec.runtime.clients.answers import ServedModel
from recipec.runtime.clients.client import Client, ServerError, connect
from recipec.runtime.errors import UserError
from recipec.runtime.inference import loaded_model
from recipec.runtime.inference.loaded_model import sampling_of, served_sampling, unsupported
from recipec.runtime.inference.text_generator import Request, TextGenerator, TextStream
from recipec.runtime.model.sampling import GREEDY, Sampling
from recipec.runtime.model.sharding import start_mesh
from recipec.runtime.settings import MeshSettings
from tests import tiny
from tests.runtime.decoders import make
from tests.trained.conftest import adapted

pytestmark = pytest.mark.usefixtures("highest")

LAYERS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "vocab_size": 512,
}
FAMILIES: dict[str, Callable[[Path], Any]] = {
    "gemma3": lambda folder: tiny.make_gemma3(folder, **LAYERS),
    "qwen3": lambda folder: make("qwen3", folder, vocab_size=512, max_position_embeddings=256),
    "falcon_h1": lambda folder: make("falcon_h1", folder, vocab_size=512, max_position_embeddings=256),
}
"""Windows; windows with YaRN; a carried state. All have more heads than key-value heads."""

MOST = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model whose answers depend on the whole prompt, and give it an end token in the middle."""
    folder = tmp_path_factory.mktemp("folder") / "tuned"
    model = tiny.make_gemma3(folder, **LAYERS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
                parameter.add_(7)  # otherwise the embedding repeats the last token
    model.save_pretrained(folder)
    write_tokenizer(folder, "gemma3")
    return folder


def expected(folder: Path, prompt: list[int], most: int = MOST) -> tuple[list[int], torch.Tensor]:
    """Return transformers' greedy tokens, and the log-probabilities that it chose from."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    options = {"do_sample": False, "max_new_tokens": most, "pad_token_id": 0, "output_logits": True}
    out = model.generate(torch.tensor([prompt]), return_dict_in_generate=True, **options)
    tokens = out.sequences[0, len(prompt) :].tolist()
    return tokens, torch.log_softmax(torch.cat(out.logits), -1)


@pytest.mark.parametrize(
    "family", ["gemma3", *(pytest.param(f, marks=pytest.mark.e2e) for f in FAMILIES if f != "gemma3")]
)
def test_concurrent_greedy_answers_match_transformers(family: str, tmp_path: Path) -> None:
    """Ask several prompts at once, of unlike lengths, and compare tokens and log-probabilities."""
    FAMILIES[family](tmp_path)
    write_tokenizer(tmp_path, "gemma3")
    model = ServedModel(connect(str(tmp_path), 1.0, name="tuned"), "tuned")
    random = np.random.default_rng(0)
    prompts = [random.integers(8, 500, length).tolist() for length in (3, 40, 11, 70)]
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda prompt: model.scored(prompt, MOST), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens, logps = expected(tmp_path, prompt)
        assert answer.tokens == tokens
        for step, row in zip(answer.logprobs, logps, strict=True):
            values, numbers = row.topk(5)
            assert [*step] == numbers.tolist()
            assert np.allclose([*step.values()], values, atol=1e-4)


@pytest.mark.e2e
def test_model_on_several_devices_answers_as_on_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split the weights over four virtual devices, as over the chips of a TPU."""
    prompts = [list(range(10, 10 + length)) for length in (5, 60)]
    answers = []
    for devices in (1, 4):
        axes = {"fsdp": 1, "tp": devices}
        monkeypatch.setattr(
            loaded_model, "mesh_here", partial(start_mesh, MeshSettings("cpu", devices, axes))
        )
        generator = TextGenerator(loaded_model.load_model(folder), likeliest=2)
        assert generator.model.mesh.size == devices
        answers.append(generator.answer([Request(prompt, 30) for prompt in prompts]))
    assert [answer.tokens for answer in answers[0]] == [answer.tokens for answer in answers[1]]
    assert all(len(answer.tokens) == 30 for answer in answers[0])


def test_stream_equals_whole_answer_and_comes_in_parts(folder: Path) -> None:
    client = connect(str(folder), 1.0, name="tuned")
    model = ServedModel(client, "tuned")
    body = model.question("Where is my parcel?", 70, ignore_eos=True)
    streamed, whole = model.streamed(body), model.whole(body)
    assert streamed.tokens == whole.tokens and len(streamed.tokens or ()) == 70
    assert streamed.text == whole.text and whole.finish_reason == "length"
    assert len(streamed.times) > 3
    text = client.post("/v1/completions", {"model": "tuned", "prompt": "Hello", "max_tokens": 3})
    assert text["choices"][0]["prompt_token_ids"][0] == 2, "the tokenizer's first token"


def test_answer_ends_at_the_folders_end_tokens(folder: Path, tmp_path: Path) -> None:
    """Name a token of the answer in generation_config.json."""
    client = connect(str(folder), 1.0, name="tuned")
    prompt = ServedModel(client, "tuned").prompt_tokens("Hello")
    tokens, _ = expected(folder, prompt)
    place = next(i for i, token in enumerate(tokens) if i > 3 and token not in tokens[:i])
    ended = Path(shutil.copytree(folder, tmp_path / "ended"))
    (ended / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokens[place]]}))
    model = ServedModel(connect(str(ended), 1.0), "ended")
    answer = model.whole(model.question("Hello", MOST))
    assert answer.tokens == tokens[: place + 1] and answer.finish_reason == "stop"


def test_wrong_requests_are_refused_as_by_a_server(folder: Path) -> None:
    client = connect(str(folder), 1.0, name="tuned")
    limit = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    body = {"model": "tuned", "max_tokens": 1, "temperature": 0}
    for status, path, more in (
        (404, "/v1/completions", {"model": "other", "prompt": [5]}),
        (400, "/v1/completions", {"prompt": [5] * limit}),
    ):
        with pytest.raises(ServerError) as raised:
            client.post(path, {**body, **more})
        assert raised.value.status == status
    with pytest.raises(ServerError, match="404"):
        client.get("/metrics")


@pytest.mark.e2e
def test_smoke_passes_on_folders_and_compares_with_the_base(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Give the script's arguments of a server with a key and an adapter, and name the folders."""
    adapter = adapted(folder, tmp_path / "adapter", seed=1)
    report = tmp_path / "smoke.json"
    words = ["--url", "http://127.0.0.1:1", "--model", "tuned", "--base", "tuned-base", "--api-key"]
    assert smoke.main([*words, "--url", str(adapter), "--json", str(report)]) == 0
    record = json.loads(report.read_text())
    states = {check["name"]: (check["state"], check["text"]) for check in record["checks"]}
    assert states["served models"] == ("ok", "tuned, tuned-base")
    assert states["version"] == ("-", "no server: JAX on cpu answers")
    assert states["differs from base"][0] == "ok" and record["figures"]["logprob_distance"] > 0.01
    assert {state for state, _ in states.values()} == {"ok", "-"} and "API key" not in states
    # Merged weights have no base next to them; the same weights are no fine-tuned model.
    capsys.readouterr()
    base = Path(shutil.copytree(folder, tmp_path / "base"))
    assert smoke.main([*words, "--url", str(folder), "--base-url", str(base)]) == 1
    assert "the merge is a no-op" in capsys.readouterr().out


@pytest.mark.e2e
def test_evaluation_of_folders_has_transformers_answers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    rows = [{"prompt": f"Say {word}.", "expected": "e"} for word in ("one", "two", "three")]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--url", str(folder), "--name", "tuned", "--base", "tuned-base", "--prompts", str(prompts)]
    words += ["--max-tokens", "16", "--results", str(tmp_path / "eval")]
    assert evaluate.main(words) == 0
    answers = map(json.loads, (tmp_path / "eval" / "tuned" / "answers.jsonl").read_text().splitlines())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for answer in answers:
        asked = [{"role": "user", "content": rows[answer["line"] - 1]["prompt"]}]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
        tokens, _ = expected(folder, ids, 16)
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        # As vLLM, without an incomplete character at the end.
        assert answer["text"] == text.rstrip("\N{REPLACEMENT CHARACTER}")
    assert not (tmp_path / "eval" / "base").exists()
    summary = json.loads((tmp_path / "eval" / "summary.json").read_text())
    assert summary["sides"]["tuned"] == {"model": "tuned", "url": str(folder), "vllm": None}
    with pytest.raises(UserError, match="lm-eval's tasks need a server"):
        evaluate.main([*words, "--tasks", "gsm8k"])


def test_folder_that_is_no_model_and_missing_packages_give_one_sentence(tmp_path: Path, root: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        connect(str(tmp_path), 1.0)
    (tmp_path / "merge.partial.json").write_text("{}")
    with pytest.raises(UserError, match="a merge that did not finish"):
        connect(str(tmp_path), 1.0)
    with pytest.raises(UserError, match="is neither the address of a server nor a folder"):
        connect(str(tmp_path / "gone"), 1.0)
    program = (
        "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); "
        "runpy.run_module('runtime.clients.smoke', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-ISc", program, str(root), "--url", str(tmp_path), "--model", "tuned"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        1,
        "error: answering from a folder needs the packages that train: jax cannot be imported\n"
        "  = help: run this with the Python that trains, or give the address of a server\n",
    )


def test_sampling_is_read_from_generation_config() -> None:
    """Check transformers' defaults for a chat, and vLLM's for a request that has a temperature."""
    drawn = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1}
    assert sampling_of(drawn) == Sampling(0.6, 20, 0.95, 0.1)
    assert sampling_of(drawn, 0.0) == served_sampling(drawn, 0) == GREEDY
    assert sampling_of({"temperature": 0.6}) == GREEDY and sampling_of({}, 0.7) == Sampling(0.7, 50)
    assert served_sampling(drawn, 1.0) == Sampling(1.0, 20, 0.95, 0.1)
    assert served_sampling({}, 1.0) == Sampling(1.0)
    assert unsupported({"repetition_penalty": 1.1, "num_beams": 1, "suppress_tokens": []}) == [
        "repetition_penalty"
    ]


def test_stream_of_text_has_whole_characters_and_spaces(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Grüße, 你好 🌈 and  two spaces"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    stream, parts = TextStream(tokenizer), list[str]()
    for length in range(1, len(tokens) + 1):
        parts.append(stream.text(tokens[:length], length == len(tokens)))
    assert "".join(parts) == text and "\N{REPLACEMENT CHARACTER}" not in "".join(parts)
    assert sum(map(bool, parts)) > 10
    assert isinstance(connect("http://127.0.0.1:1", 1.0), Client)
