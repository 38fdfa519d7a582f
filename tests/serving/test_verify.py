"""`recipe serve verify` against an endpoint that computes with transformers: it passes on the checkpoint that
is served, and finds other weights, another tokenizer, another template and another choice of tokens."""

from __future__ import annotations

import functools
import importlib
import json
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from compiler.miniature_tokenizer import write_tokenizer
from compiler.serving import verify as command
from compiler.serving import verify_reference
from compiler.serving.verify import verify
from compiler.serving.verify_compare import Compared, Step, Tolerance, problems, tolerance
from compiler.serving.verify_endpoint import Case, Reply
from compiler.serving.verify_reference import Reference, ServedTypes, Tokens
from runtime import memory
from runtime.errors import UserError
from tests import tiny
from tests.serving.fake_vllm import END, FakeVllm, Language, Ranked, Said

Start = Callable[..., FakeVllm]

TOKENS = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("verify") / "merged")


def made(folder: Path, seed: int = 0, vocabulary: int = 512) -> Path:
    """A tiny Gemma 3 whose answers are more than its prompts' last tokens."""
    import torch

    model = tiny.make_gemma3(
        folder,
        seed=seed,
        vocab_size=vocabulary,
        num_hidden_layers=2,
        layer_types=["sliding_attention"] * 2,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # What the layers add outweighs the embedding, which by itself says the last token again.
            if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
                parameter.add_(7)
    model.save_pretrained(folder)
    write_tokenizer(folder, "gemma3")
    return folder


class Computed(Language):
    """A server's language that is computed from a checkpoint.

    Args:
        types: that the server computes in; None is float32.
        rank: of the token that is chosen, 0 being the likeliest.
    """

    def __init__(self, folder: Path, types: ServedTypes | None = None, rank: int = 0) -> None:
        super().__init__()
        self.tokens = Tokens(folder)
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
    return verify(server.url, model=folder, **{"tokens": TOKENS, "server_dtype": "float32", **more})


def changed(checkpoint: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of the checkpoint with other weights."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, folder)
    arrays = load_file(folder / "model.safetensors")
    change(arrays)
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_the_checkpoint_that_is_served(fake: Start, checkpoint: Path) -> None:
    server = fake(["m"], language=Computed(checkpoint))
    result = check(server, checkpoint)
    assert result["problems"] == []
    kinds = [(row["kind"], row["same_prompt"], row["parts_at"]) for row in result["prompts"]]
    assert kinds == [("text", True, None)] * 6 + [("chat", True, None)] * 3
    assert all(row["tokens"] == TOKENS or row["tokens"] > 0 for row in result["prompts"])
    # Of different lengths, one of them past the sliding window of 8 tokens.
    assert len({row["prompt_tokens"] for row in result["prompts"]}) == 9
    assert result["largest"] < 1e-4 and result["tolerance"]["source"] == "the server computes in float32"
    assert all(body["temperature"] == 0 for body in server.bodies("/v1/completions"))


def test_other_weights_are_found(fake: Start, checkpoint: Path, tmp_path: Path) -> None:
    """One matrix, a quarter of which is larger by 5 %; the norm behind it would hide the whole."""

    def larger(arrays: dict[str, Any]) -> None:
        (name,) = (name for name in arrays if name.endswith("layers.0.self_attn.o_proj.weight"))
        arrays[name][:, :32] *= 1.05

    other = changed(checkpoint, tmp_path / "other", larger)
    result = check(fake(["m"], language=Computed(other)), checkpoint)
    assert any(problem.startswith("log probabilities differ by up to") for problem in result["problems"])
    assert all(row["same_prompt"] for row in result["prompts"])


def test_an_adapter_that_was_not_merged_is_found(fake: Start, checkpoint: Path, tmp_path: Path) -> None:
    """The base in place of the merged weights: far apart, and other answers."""
    result = check(fake(["m"], language=Computed(made(tmp_path / "base", seed=1))), checkpoint)
    assert any("answers part from the checkpoint's by more than a tie" in p for p in result["problems"])


def test_another_tokenizer_is_found(fake: Start, checkpoint: Path) -> None:
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


def test_another_template_is_found(fake: Start, checkpoint: Path) -> None:
    language = Computed(checkpoint)
    language.encode_chat = lambda messages: language.encode(  # type: ignore[method-assign]
        f"[INST] {messages[-1]['content']} [/INST]"
    )
    (problem,) = check(fake(["m"], language=language), checkpoint)["problems"]
    assert problem.startswith("the server has another chat template: 3 of 3 prompts have other tokens there")
    assert "<start_of_turn>user" in problem and "[INST]" in problem


def test_a_server_that_refuses_chats_is_found(fake: Start, checkpoint: Path) -> None:
    server = fake(["m"], language=Computed(checkpoint))
    server.faults.fail["/v1/chat/completions"] = 400
    (problem,) = check(server, checkpoint)["problems"]
    assert problem.startswith("the server has another chat template: it refuses a chat: ")


def test_a_server_that_does_not_take_the_likeliest_is_found(fake: Start, checkpoint: Path) -> None:
    result = check(fake(["m"], language=Computed(checkpoint, rank=1)), checkpoint)
    assert any("are not what the server itself thought likeliest" in p for p in result["problems"])


def test_a_vocabulary_of_another_size_is_found(fake: Start, checkpoint: Path, tmp_path: Path) -> None:
    result = check(fake(["m"], language=Computed(made(tmp_path / "wide", vocabulary=4096))), checkpoint)
    assert any("is beyond the checkpoint's" in problem for problem in result["problems"])


TYPES = [
    ServedTypes("bfloat16"),
    ServedTypes("bfloat16", "fp8"),
    ServedTypes("bfloat16", "fp8_e5m2", "fp8"),
]


@pytest.mark.parametrize("types", TYPES, ids=str)
def test_rounding_is_measured_in_the_servers_types(
    types: ServedTypes,
    fake: Start,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = fake(["m"], language=Computed(checkpoint, types))
    assert check(server, checkpoint)["problems"], "held to float32's tolerance, it is another model"
    monkeypatch.setattr(command, "served_types", lambda *_: types)
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


def test_coarser_types_are_allowed_more(
    fake: Start, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, allowed = fake(["m"], language=Computed(checkpoint)), []
    for types in (ServedTypes("float32"), *TYPES[:2]):
        monkeypatch.setattr(command, "served_types", lambda *_, types=types: types)
        allowed.append(check(server, checkpoint)["tolerance"]["mean"])
    assert allowed == sorted(allowed) and len({*allowed}) == 3


def test_a_given_tolerance_is_the_only_one(fake: Start, checkpoint: Path) -> None:
    server = fake(["m"], language=Computed(checkpoint, ServedTypes("bfloat16")))
    assert check(server, checkpoint, tolerance=1e-6)["problems"]
    result = check(server, checkpoint, tolerance=100.0)
    assert result["problems"] == [] and result["tolerance"]["mean"] is None


@pytest.mark.parametrize(("types", "largest"), [*zip(TYPES, (0.36, 2.22, 4.5), strict=True)], ids=str)
def test_a_reference_in_bfloat16_is_coarse(types: ServedTypes, largest: float) -> None:
    found = tolerance([], types, "bfloat16", None)
    assert found.largest == pytest.approx(largest) and "--dtype float32 measures it" in found.source


def step(token: int, best: int, margin: float) -> Step:
    return Step(token, best, margin, True, (-1.0,), (-1.0,))


def test_a_tie_is_no_difference(checkpoint: Path) -> None:
    reply = Reply(Case("a prompt", "a prompt"), (2, 30), (40, 41), ({40: -1.0}, {41: -1.0}))
    allowed = Tolerance(0.01, 0.01, "")
    tie = Compared(reply, (2, 30), (step(40, 45, 0.015), step(41, 41, 0.0)))
    assert (tie.ties(0.02), tie.parted(0.02)) == (1, None)
    assert problems([tie], allowed, Tokens(checkpoint)) == []
    apart = Compared(reply, (2, 30), (step(40, 40, 0.0), step(41, 45, 0.5)))
    (problem,) = problems([apart], allowed, Tokens(checkpoint))
    assert problem.endswith("`a prompt` at token 1, by 0.5")


def test_own_prompts_are_asked_too(fake: Start, checkpoint: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "Mine?"}\n{"messages": [{"role": "user", "content": "And this?"}]}\n')
    result = check(fake(["m"], language=Computed(checkpoint)), checkpoint, prompts=own)
    assert [row["prompt"] for row in result["prompts"][-2:]] == ["Mine?", "And this?"]
    assert result["prompts"][-1]["kind"] == "chat"
    own.write_text('{"prompt": 3}\n')
    with pytest.raises(UserError, match=r"own.jsonl:1: `prompt` must be a text"):
        check(fake(["m"]), checkpoint, prompts=own)


def test_prompts_that_the_server_has_no_room_for_are_left_out(fake: Start, checkpoint: Path) -> None:
    result = check(fake(["m"], language=Computed(checkpoint), max_model_len=40), checkpoint)
    assert result["problems"] == []
    assert max(row["prompt_tokens"] for row in result["prompts"]) <= 40 - TOKENS


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "bfloat16"}, "bfloat16"),
    ({"torch_dtype": "float16"}, "float16"),
    ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
    ({"dtype": "float32"}, "bfloat16"),
    ({}, "bfloat16"),
]


@pytest.mark.parametrize(("config", "dtype"), CONFIGS)
def test_vllms_own_choice_of_dtype(config: dict[str, Any], dtype: str) -> None:
    assert str(command.served_types(None, config, None)) == dtype
    assert str(command.served_types(None, config, "float32")) == "float32"


# What cannot be compared, in a sentence each.


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return f"{caught.value.message} | {caught.value.help}"


def test_a_url_that_does_not_answer(checkpoint: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert refusal(lambda: verify(url, model=checkpoint)).startswith(f"nothing listens at {url}")


def test_a_key_that_is_missing(checkpoint: Path, fake: Start) -> None:
    said = refusal(lambda: check(fake(["m"], key="secret"), checkpoint))
    assert "answers 401" in said and said.endswith("export VLLM_API_KEY with the server's key")


def test_another_model_s_server(checkpoint: Path, fake: Start) -> None:
    server = fake(["a", "b"])
    assert f"{server.url} serves a, b: which of them is meant? | --name NAME" in refusal(
        lambda: check(server, checkpoint)
    )
    assert f"{server.url} serves a, b, and not mine" in refusal(
        lambda: check(server, checkpoint, name="mine")
    )


def test_an_older_server_that_tells_no_ids(checkpoint: Path, fake: Start) -> None:
    server = fake(["m"])
    answer = {"choices": [{"text": "x", "logprobs": None, "token_ids": None}]}
    server.faults.shape["/v1/completions"] = answer
    assert "tells no token ids" in refusal(lambda: check(server, checkpoint))


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_packages_that_are_not_installed(
    missing: str, checkpoint: Path, fake: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def without(name: str, *rest: Any) -> Any:
        if name == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest)

    monkeypatch.setattr(verify_reference.importlib, "import_module", without)
    said = refusal(lambda: check(fake(["m"]), checkpoint))
    assert said.startswith(
        f"verifying compares with transformers, and {missing} is not installed | pip install"
    )


def test_a_model_that_memory_does_not_hold(
    checkpoint: Path, fake: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 4000000 kB\nMemAvailable:  1000000 kB\n")
    monkeypatch.setattr(memory, "MEMORY", tmp_path / "meminfo")
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
    ("empty", lambda folder: folder.mkdir(), "empty is no checkpoint: it has no config.json"),
    (
        "odd",
        lambda folder: (folder.mkdir(), (folder / "config.json").write_text("{")),
        "config.json is not JSON",
    ),
    (
        "light",
        lambda folder: (folder.mkdir(), (folder / "config.json").write_text("{}")),
        "light holds no weights: no .safetensors file",
    ),
    (
        "damaged",
        lambda folder: (
            folder.mkdir(),
            (folder / "config.json").write_text("{}"),
            (folder / "model.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0{]"),
        ),
        "model.safetensors is damaged: its header cannot be read",
    ),
]


@pytest.mark.parametrize(("name", "make", "wanted"), FOLDERS)
def test_folders_that_hold_no_checkpoint(
    name: str, make: Callable[[Path], Any], wanted: str, fake: Start, tmp_path: Path
) -> None:
    make(tmp_path / name)
    assert wanted in refusal(lambda: check(fake(["m"]), tmp_path / name))


def test_a_checkpoint_of_an_unknown_architecture(fake: Start, checkpoint: Path, tmp_path: Path) -> None:
    odd = tmp_path / "odd"
    shutil.copytree(checkpoint, odd)
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps({**config, "architectures": ["Gemma9"]}))
    said = refusal(lambda: check(fake(["m"], language=Computed(checkpoint)), odd))
    assert said.startswith(f"transformers does not load {odd}: ")


# The command.


def invoke(*arguments: object) -> Any:
    app = typer.Typer()
    app.command()(command.command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command(fake: Start, checkpoint: Path) -> None:
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


def test_the_commands_faults(fake: Start, checkpoint: Path, tmp_path: Path) -> None:
    assert invoke("http://127.0.0.1:1").exit_code == 2
    done = invoke("not an address", "--model", checkpoint)
    assert done.exit_code == 1 and done.stderr.startswith(
        "error: 'not an address' is not the address of a server\n"
    )
    done = invoke("http://127.0.0.1:1", "--artifact", tmp_path / "nowhere")
    assert done.exit_code == 1
    assert done.stderr.startswith(f"error: there is no artifact {tmp_path / 'nowhere'}\n  = help: ")
