"""Tests of `recipe serve verify` against an endpoint that computes with transformers.

It passes on the served checkpoint. It finds other weights, another tokenizer, another template and another
choice of tokens. What it cannot compare is one sentence.
"""

from __future__ import annotations

import functools
import importlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from recipec.compiler import terminal
from recipec.compiler.cli.main import app
from recipec.compiler.deployment import verify_reference
from recipec.compiler.deployment.verify_reference import (
    Reference,
    ReferenceTokenizer,
    ServedTypes,
    local_span,
)
from recipec.compiler.deployment.verify_server import (
    ComparedPrompt,
    ComparedToken,
    Reply,
    Tolerance,
    VerifyOptions,
    VerifyPrompt,
    allowance,
    problems,
    served_types,
    verify,
)
from recipec.compiler.miniature.small_checkpoint import write_tokenizer
from recipec.runtime import process_memory
from recipec.runtime.errors import UserError
from tests import tiny
from tests.clients.fake_language import END, Language, Ranked, Said
from tests.clients.fake_vllm import FakeVllm, Start

TOKENS = 3


def made(folder: Path, seed: int = 0, vocabulary: int = 512) -> Path:
    """Make a tiny Gemma 3 that does not only repeat a prompt's last token."""
    model = tiny.make_gemma3(
        folder, seed=seed, vocab_size=vocabulary, num_hidden_layers=2, layer_types=["sliding_attention"] * 2
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Make the layers outweigh the embedding, which alone would repeat the last token.
            if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
                parameter.add_(7)
    model.save_pretrained(folder)
    write_tokenizer(folder, "gemma3")
    return folder


class Computed(Language):
    """A server's language that a checkpoint computes.

    Args:
        types: the types that the server computes in; None for float32.
        rank: the rank of the chosen token; 0 is the likeliest.
    """

    def __init__(self, folder: Path, types: ServedTypes | None = None, rank: int = 0) -> None:
        super().__init__()
        self.tokens = ReferenceTokenizer(folder)
        self.reference = Reference(folder, verify_reference.read_config(folder), "float32")
        self.kv_cache = types.kv_cache if types else "auto"
        self.rank = rank
        if types:
            self.reference.lower(types)
        self.logprobs = functools.cache(self._logprobs)

    def _logprobs(self, prefix: tuple[int, ...]) -> Any:
        return self.reference.logprobs(prefix, [0], self.kv_cache)[0]

    def encode(self, text: str) -> list[int]:
        return list(self.tokens.of_text(text))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return list(self.tokens.of_chat(messages))

    def decode(self, tokens: Any) -> str:
        return self.tokens.show(list(tokens))

    def predict(self, model: str, prefix: Sequence[int]) -> Ranked:
        values = self.logprobs(tuple(prefix))
        likeliest = values.argsort()[::-1][:8]
        return [(int(token), float(values[token])) for token in likeliest]

    def logprob(self, model: str, prefix: Sequence[int], token: int) -> float:
        return float(self.logprobs(tuple(prefix))[token])

    def answer(
        self, model: str, prompt: Sequence[int], asked: str, request: Mapping[str, Any], sample: int
    ) -> Said:
        said: list[int] = []
        while len(said) < request["max_tokens"] and END not in said:
            said.append(self.predict(model, [*prompt, *said])[self.rank][0])
        return Said(said, "stop" if END in said else "length")


def check(server: FakeVllm, folder: Path, **more: Any) -> dict[str, Any]:
    options = {"tokens": TOKENS, "server_dtype": "float32", **more}
    return verify(VerifyOptions(server.url, model=folder, **options))


def changed(checkpoint: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Copy the checkpoint with other weights."""
    shutil.copytree(checkpoint, folder)
    arrays = load_file(folder / "model.safetensors")
    change(arrays)
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("verify") / "merged")


def test_verify_passes_on_the_served_checkpoint(fake: Start, checkpoint: Path) -> None:
    server = fake(["m"], language=Computed(checkpoint))
    result = check(server, checkpoint)
    assert result["problems"] == []
    kinds = [(row["kind"], row["same_prompt"], row["parts_at"]) for row in result["prompts"]]
    assert kinds == [("text", True, None)] * 6 + [("chat", True, None)] * 3
    assert all(row["tokens"] == TOKENS or row["tokens"] > 0 for row in result["prompts"])
    # The lengths differ, and one exceeds the sliding window of 8 tokens.
    assert len({row["prompt_tokens"] for row in result["prompts"]}) == 9
    assert result["largest"] < 1e-4 and result["tolerance"]["source"] == "the server computes in float32"
    assert all(body["temperature"] == 0 for body in server.bodies("/v1/completions"))


@pytest.mark.parametrize(
    ("config", "span"),
    [
        ({"text_config": {"sliding_window": 512}}, 512),
        ({"sliding_window": 4096, "use_sliding_window": False}, None),
        ({"text_config": {"attention_chunk_size": 8192}, "model_type": "llama4"}, 8192),
        ({"sliding_window": None, "attention_chunk_size": None}, None),
    ],
)
def test_local_span_is_the_sliding_window_or_attention_chunk(
    config: dict[str, Any], span: int | None
) -> None:
    assert local_span(config) == span


def test_verify_notes_that_no_prompt_exceeds_the_local_span(
    fake: Start, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Report that the built-in prompts reach only one of Llama 4's chunks of 8,192 tokens."""
    monkeypatch.setattr(verify_reference, "local_span", lambda config: 8192)
    monkeypatch.setattr("recipec.compiler.deployment.verify_server.LONGEST", 90)
    monkeypatch.setattr(terminal.manner, "quiet", False)  # an earlier command may have changed it
    check(fake(["m"], language=Computed(checkpoint)), checkpoint, tokens=1)
    said = " ".join(capsys.readouterr().err.split())
    assert "note: local layers see 8,192 tokens, and no prompt is longer than " in said
    assert "--prompts FILE adds longer ones" in said


def test_verify_finds_changed_weights(fake: Start, checkpoint: Path, tmp_path: Path) -> None:
    """Enlarge a quarter of one matrix by 5 %. The next norm would hide a change of all of it."""

    def larger(arrays: dict[str, Any]) -> None:
        (name,) = (name for name in arrays if name.endswith("layers.0.self_attn.o_proj.weight"))
        arrays[name][:, :32] *= 1.05

    other = changed(checkpoint, tmp_path / "other", larger)
    result = check(fake(["m"], language=Computed(other)), checkpoint)
    assert any(problem.startswith("log probabilities differ by up to") for problem in result["problems"])
    assert all(row["same_prompt"] for row in result["prompts"])


def test_verify_finds_an_unmerged_adapter(fake: Start, checkpoint: Path, tmp_path: Path) -> None:
    """Serve the base in place of the merged weights: the answers differ widely."""
    result = check(fake(["m"], language=Computed(made(tmp_path / "base", seed=1))), checkpoint)
    assert any("answers differ from the checkpoint's by more than a tie" in p for p in result["problems"])


def test_verify_finds_a_different_tokenizer(fake: Start, checkpoint: Path) -> None:
    language = Computed(checkpoint)
    real = language.encode
    language.encode = lambda text: real(text)[1:]  # type: ignore[method-assign]
    result = check(fake(["m"], language=language), checkpoint)
    (problem,) = result["problems"]
    assert problem.startswith(
        "the server has another tokenizer: 6 of 6 prompts have other tokens there; `Paris`"
    )
    assert "from token 0 on it reads" in problem and "'<bos>" in problem
    # The weights are still compared, on the tokens that the server read.
    assert result["largest"] < 1e-4


def test_verify_finds_a_different_chat_template(fake: Start, checkpoint: Path) -> None:
    language = Computed(checkpoint)
    language.encode_chat = lambda messages: language.encode(  # type: ignore[method-assign]
        f"[INST] {messages[-1]['content']} [/INST]"
    )
    (problem,) = check(fake(["m"], language=language), checkpoint)["problems"]
    assert problem.startswith("the server has another chat template: 3 of 3 prompts have other tokens there")
    assert "<start_of_turn>user" in problem and "[INST]" in problem


def test_reference_gives_the_template_the_variables_of_the_run(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ enable_thinking }}")
    (tmp_path / "recipe.lock.json").write_text('{"recipe": {"data": {"reasoning": "empty"}}}')
    tokens = ReferenceTokenizer(tmp_path)
    assert tokens.show(tokens.of_chat([{"role": "user", "content": "a"}])) == "False"


def test_verify_reports_a_server_that_refuses_chats(fake: Start, checkpoint: Path) -> None:
    server = fake(["m"], language=Computed(checkpoint))
    server.faults.fail["/v1/chat/completions"] = 400
    (problem,) = check(server, checkpoint)["problems"]
    assert problem.startswith("the server has another chat template: it refuses a chat: ")


def test_verify_finds_a_server_that_does_not_decode_greedily(fake: Start, checkpoint: Path) -> None:
    result = check(fake(["m"], language=Computed(checkpoint, rank=1)), checkpoint)
    assert any("are not the server's own likeliest tokens" in p for p in result["problems"])


def test_verify_finds_tokens_beyond_the_vocabulary(fake: Start, checkpoint: Path, tmp_path: Path) -> None:
    result = check(fake(["m"], language=Computed(made(tmp_path / "wide", vocabulary=4096))), checkpoint)
    assert any("is beyond the checkpoint's" in problem for problem in result["problems"])


TYPES = [ServedTypes("bfloat16"), ServedTypes("bfloat16", "fp8"), ServedTypes("bfloat16", "fp8_e5m2", "fp8")]


@pytest.mark.parametrize("types", TYPES[::2], ids=str)
def test_tolerance_covers_rounding_to_the_server_dtypes(
    types: ServedTypes, fake: Start, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fake(["m"], language=Computed(checkpoint, types))
    assert check(server, checkpoint)["problems"], "held to float32's tolerance, it is another model"
    monkeypatch.setattr("recipec.compiler.deployment.verify_server.served_types", lambda *_: types)
    result = check(server, checkpoint)
    assert result["problems"] == []
    assert result["tolerance"]["source"].startswith(
        f"3 times what rounding to {types} makes of these answers"
    )
    assert result["tolerance"]["largest"] == pytest.approx(3 * result["largest"], rel=0.05)

    def other(arrays: dict[str, Any]) -> None:
        for name in arrays:
            if name.endswith("o_proj.weight"):
                arrays[name] *= -1

    wrong = changed(checkpoint, tmp_path / "wrong", other)
    assert check(fake(["m"], language=Computed(wrong, types)), checkpoint)["problems"]


def test_given_tolerance_replaces_the_measured_one(fake: Start, checkpoint: Path) -> None:
    server = fake(["m"], language=Computed(checkpoint, ServedTypes("bfloat16")))
    assert check(server, checkpoint, tolerance=1e-6)["problems"]
    result = check(server, checkpoint, tolerance=100.0)
    assert result["problems"] == [] and result["tolerance"]["mean"] is None


@pytest.mark.parametrize(("types", "largest"), [*zip(TYPES, (0.36, 2.22, 4.5), strict=True)], ids=str)
def test_bfloat16_reference_uses_fixed_coarse_tolerance(types: ServedTypes, largest: float) -> None:
    found = allowance([], types, "bfloat16", None)
    assert found.largest == pytest.approx(largest) and "--dtype float32 measures it" in found.source


def step(token: int, best: int, margin: float) -> ComparedToken:
    return ComparedToken(token, best, margin, True, (-1.0,), (-1.0,))


def test_near_tie_is_not_reported_as_a_difference(checkpoint: Path) -> None:
    reply = Reply(VerifyPrompt("a prompt", "a prompt"), (2, 30), (40, 41), ({40: -1.0}, {41: -1.0}))
    allowed = Tolerance(0.01, 0.01, "")
    tie = ComparedPrompt(reply, (2, 30), (step(40, 45, 0.015), step(41, 41, 0.0)))
    assert (tie.ties(0.02), tie.parted(0.02)) == (1, None)
    assert problems([tie], allowed, ReferenceTokenizer(checkpoint)) == []
    apart = ComparedPrompt(reply, (2, 30), (step(40, 40, 0.0), step(41, 45, 0.5)))
    (problem,) = problems([apart], allowed, ReferenceTokenizer(checkpoint))
    assert problem.endswith("`a prompt` at token 1, by 0.5")


def test_verify_also_compares_the_user_prompts(fake: Start, checkpoint: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "Mine?"}\n{"messages": [{"role": "user", "content": "And this?"}]}\n')
    result = check(fake(["m"], language=Computed(checkpoint)), checkpoint, prompts=own)
    assert [row["prompt"] for row in result["prompts"][-2:]] == ["Mine?", "And this?"]
    assert result["prompts"][-1]["kind"] == "chat"
    own.write_text('{"prompt": 3}\n')
    with pytest.raises(UserError, match=r"own.jsonl:1: `prompt` must be a text"):
        check(fake(["m"]), checkpoint, prompts=own)


def test_prompts_over_the_server_length_limit_are_left_out(fake: Start, checkpoint: Path) -> None:
    result = check(fake(["m"], language=Computed(checkpoint), max_model_len=40), checkpoint)
    assert result["problems"] == []
    assert max(row["prompt_tokens"] for row in result["prompts"]) <= 40 - TOKENS


def test_default_server_dtype_follows_vllm() -> None:
    for config, dtype in (
        ({"torch_dtype": "float16"}, "float16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": "float32"}, "bfloat16"),
        ({}, "bfloat16"),
    ):
        assert str(served_types(None, config, None)) == dtype
        assert str(served_types(None, config, "float32")) == "float32"


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return f"{caught.value.message} | {caught.value.help}"


def test_ambiguous_or_missing_model_name_is_refused(checkpoint: Path, fake: Start) -> None:
    server = fake(["a", "b"])
    assert f"{server.url} serves a, b: which of them is meant? | --name NAME" in refusal(
        lambda: check(server, checkpoint)
    )
    assert f"{server.url} does not serve mine, but a, b" in refusal(
        lambda: check(server, checkpoint, name="mine")
    )


def test_server_without_token_ids_is_refused(checkpoint: Path, fake: Start) -> None:
    server = fake(["m"])
    answer = {"choices": [{"text": "x", "logprobs": None, "token_ids": None}]}
    server.faults.shape["/v1/completions"] = answer
    assert "returns no token ids" in refusal(lambda: check(server, checkpoint))


def test_missing_package_error_gives_the_install_command(
    checkpoint: Path, fake: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def without(name: str, *rest: Any) -> Any:
        if name == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest)

    monkeypatch.setattr(verify_reference.importlib, "import_module", without)
    said = refusal(lambda: check(fake(["m"]), checkpoint))
    assert said.startswith("verifying compares with transformers, and torch is not installed | pip install")


def test_model_larger_than_memory_is_refused_before_loading(
    checkpoint: Path, fake: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 4000000 kB\nMemAvailable:  1000000 kB\n")
    monkeypatch.setattr(process_memory, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(verify_reference, "count_numbers", lambda folder: 31_000_000_000)
    server = fake(["m"])
    said = refusal(lambda: check(server, checkpoint))
    assert (
        f"{checkpoint} has 31.00 billion numbers, which take 131.7 GB in float32, and this machine has"
        in said
    )
    assert "1.0 GB available" in said and "--dtype bfloat16 takes 66.6 GB" in said
    assert not server.bodies("/v1/completions")


FOLDERS: list[tuple[str, Callable[[Path], Any], str]] = [
    ("nowhere", lambda folder: None, "nowhere is not there | run merge.py, or name the merged folder"),
    (
        "odd",
        lambda folder: (folder.mkdir(), (folder / "config.json").write_text("{")),
        "config.json is not JSON: Expecting property name enclosed in double quotes: line 1 column 2",
    ),
    (
        "damaged",
        lambda folder: (
            folder.mkdir(),
            (folder / "config.json").write_text("{}"),
            (folder / "model.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0{]"),
        ),
        "damaged are damaged: model.safetensors is not a safetensors file",
    ),
]


@pytest.mark.parametrize(("name", "make", "wanted"), FOLDERS)
def test_invalid_checkpoint_folders_give_one_sentence_errors(
    name: str, make: Callable[[Path], Any], wanted: str, fake: Start, tmp_path: Path
) -> None:
    make(tmp_path / name)
    assert wanted in refusal(lambda: check(fake(["m"]), tmp_path / name))


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["serve", "verify", *map(str, arguments)])


def test_verify_command_prints_comparison_and_verdict(fake: Start, checkpoint: Path) -> None:
    server = fake(["m"], language=Computed(checkpoint))
    common = (server.url, "--model", checkpoint, "--tokens", 2, "--server-dtype", "float32")
    done = invoke(*common)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["prompt", "kind", "tokens"] and "same answer" in lines[0]
    assert lines[-1] == "verdict: the same model"
    assert json.loads(invoke(*common, "--json").stdout)["problems"] == []
    other = fake(["m"], language=Computed(checkpoint, rank=1))
    failed = invoke(other.url, *common[1:])
    assert failed.exit_code == 1
    assert failed.stdout.splitlines()[-1] == "verdict: the endpoint is not this checkpoint"


def test_verify_command_errors_are_one_sentence(fake: Start, checkpoint: Path, tmp_path: Path) -> None:
    assert invoke("http://127.0.0.1:1").exit_code == 2
    done = invoke("not an address", "--model", checkpoint)
    assert str(done.exception) == "'not an address' is not the address of a server"
    done = invoke("http://127.0.0.1:1", "--artifact", tmp_path / "nowhere")
    assert str(done.exception) == f"there is no artifact {tmp_path / 'nowhere'}" and done.exception.help
