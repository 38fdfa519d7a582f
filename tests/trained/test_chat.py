"""Tests of `recipe chat`: its answers are transformers' own, and other folders give an error."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from recipec.compiler.cli.main import app
from recipec.compiler.errors import ArtifactError
from recipec.compiler.trained.chat import Talk, converse
from recipec.compiler.trained.chat_engines import Options
from recipec.spec.diagnostics import printable

GREEDY = ("--temperature", "0", "--max-tokens", "12")


def expected(model: Path, turns: Sequence[str], adapter: Path | None = None) -> list[str]:
    """Return transformers' greedy answer to each turn, as a terminal shows it.

    Each token has the largest logit of the whole text.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network: Any = AutoModelForCausalLM.from_pretrained(model)
    if adapter:
        network = PeftModel.from_pretrained(network, adapter)
    messages, answers = [], []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        start = len(ids)
        with torch.inference_mode():
            while len(ids) - start < 12 and tokenizer.eos_token_id not in ids[start:]:
                ids.append(int(network(torch.tensor([ids])).logits[0, -1].argmax()))
        answers.append(tokenizer.decode(ids[start:], skip_special_tokens=True))
        messages.append({"role": "assistant", "content": answers[-1]})
    return [printable(answer) for answer in answers]


def talked(*arguments: str, typed: str = "") -> str:
    done = CliRunner().invoke(app, ["chat", *arguments], input=typed)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def test_greedy_answers_match_transformers(model: Path) -> None:
    first, second = expected(model, ["Where is it?", "And why?"])
    assert first != second
    assert talked(str(model), *GREEDY, "--prompt", "Where is it?") == f"{first}\n"
    # Each line of a pipe is a turn of one conversation, until /reset starts a new one.
    typed = "Where is it?\nAnd why?\n/reset\nAnd why?\n/exit\nno more\n"
    (alone,) = expected(model, ["And why?"])
    assert alone != second
    assert talked(str(model), *GREEDY, typed=typed) == f"{first}\n{second}\n{alone}\n"


@pytest.mark.parametrize("engine", ["jax", "transformers"])
def test_chat_says_which_engine_answers_and_all_answer_alike(model: Path, engine: str) -> None:
    words = ["chat", str(model), *GREEDY, "--engine", engine]
    done = CliRunner().invoke(app, words, input="Where is it?\nAnd why?\n")
    assert done.exit_code == 0, (done.output, done.exception)
    assert done.stdout == "".join(f"{text}\n" for text in expected(model, ["Where is it?", "And why?"]))
    assert (
        done.stderr
        == {"jax": "JAX on cpu answers\n", "transformers": "transformers on cpu answers\n"}[engine]
    )


def test_interrupted_answer_is_discarded_and_the_chat_continues(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Press Ctrl-C after the first tokens of the second answer."""
    said, answers = list[str](), 0

    def say(text: str) -> None:
        said.append(text)
        if answers == 2 and text.strip():
            raise KeyboardInterrupt

    talk = Talk(model, Options(max_tokens=12, temperature=0, engine="jax"), say)
    answer = talk.answer

    def counted(text: str) -> str:
        nonlocal answers
        answers += 1
        return answer(text)

    monkeypatch.setattr(talk, "answer", counted)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    lines = iter(["Where is it?", "Tell me more.", "And why?"])
    monkeypatch.setattr("recipec.compiler.trained.chat._lines", lambda prompt: lines)
    converse(talk)
    assert "the answer was stopped and discarded" in capsys.readouterr().err
    first, second = expected(model, ["Where is it?", "And why?"])
    assert [message["content"] for message in talk.messages[::2]] == ["Where is it?", "And why?"]
    assert [printable(message["content"]) for message in talk.messages[1::2]] == [first, second]


@pytest.mark.parametrize("engine", ["jax", "transformers"])
def test_conversation_that_is_too_long_is_refused_in_one_sentence(
    model: Path, tmp_path: Path, engine: str
) -> None:
    """Answer up to the last position, and refuse the next turn."""
    short = Path(shutil.copytree(model, tmp_path / "short"))
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 40}))
    (short / "generation_config.json").write_text(json.dumps({"eos_token_id": 511}))
    talk = Talk(short, Options(temperature=0, engine=engine), lambda text: None)
    talk.answer("Where is it?")
    kept = list(talk.messages)
    with pytest.raises(ArtifactError, match=r"has \d+ tokens, and the model has 40 positions") as raised:
        talk.answer("And why? " * 20)
    assert raised.value.help == "/reset begins a new conversation" and talk.messages == kept


def test_model_that_jax_cannot_answer_as_transformers_does_chats_with_transformers(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    penalized = Path(shutil.copytree(model, tmp_path / "penalized"))
    (penalized / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.5}))
    reason = "generation_config.json sets repetition_penalty, which JAX's decoder does not have"
    with pytest.raises(ArtifactError, match=reason) as raised:
        Talk(penalized, Options(engine="jax"), print)
    assert raised.value.help == "--engine transformers"
    Talk(penalized, Options(), print)
    assert capsys.readouterr().err.endswith(
        f"note: transformers answers: {reason}\ntransformers on cpu answers\n"
    )


def test_adapter_chat_uses_recorded_base_or_base_option(model: Path, adapter: Path, tmp_path: Path) -> None:
    (plain,), (with_it,) = (expected(model, ["Where is it?"], each) for each in (None, adapter))
    assert plain != with_it
    assert talked(str(adapter), *GREEDY, "--prompt", "Where is it?") == f"{with_it}\n"
    moved = shutil.copytree(adapter, tmp_path / "moved")
    config = json.loads((moved / "adapter_config.json").read_text())
    (moved / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "gone"}))
    assert talked(str(moved), *GREEDY, "--base", str(model), "--prompt", "Where is it?") == f"{with_it}\n"
    done = CliRunner().invoke(app, ["chat", str(moved), "--prompt", "Where is it?"])
    assert isinstance(done.exception, ArtifactError) and "--base DIR" in str(done.exception.help)


def test_adapter_uses_the_chat_template_and_reasoning_of_its_run(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(adapter, tmp_path / "merged-adapter")
    (folder / "recipe.lock.json").write_text(json.dumps({"recipe": {"data": {"reasoning": "empty"}}}))
    demand = "{{ raise_exception('thinking') if enable_thinking is not false }}"
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}?" + demand)
    talk = Talk(folder, Options(max_tokens=1), print)
    talk.answer("a")
    asked = [{"role": "user", "content": "a"}]
    assert talk.tokenizer.apply_chat_template(asked, tokenize=False, enable_thinking=False) == "a?"


def test_failed_turn_leaves_conversation_unchanged(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "picky.jinja"
    template.write_text("{% if messages|length > 2 %}{{ raise_exception('one turn') }}{% endif %}Q")
    said = io.StringIO()
    talk = Talk(model, Options(template=template, max_tokens=2, temperature=0), said.write)
    answer = talk.answer("a")
    assert said.getvalue() == f"{answer}\n" and len(talk.messages) == 2
    with pytest.raises(ArtifactError, match="one turn"):
        talk.answer("b")
    assert len(talk.messages) == 2


def test_artifact_folder_chats_with_its_merged_model(model: Path, tmp_path: Path) -> None:
    artifact = tmp_path / "run"
    artifact.mkdir()
    (artifact / "recipe.lock.json").write_text(json.dumps({"recipe": {"merge": {"output": "out"}}}))
    with pytest.raises(ArtifactError, match="is not there") as raised:
        Talk(artifact, Options(), print)
    assert raised.value.help == f"cd {artifact} && python merge.py"
    (artifact / "out").symlink_to(model)
    assert talked(str(artifact), *GREEDY, "--prompt", "Hi") == f"{expected(model, ['Hi'])[0]}\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "neither config.json nor adapter_config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"{}"), "cannot be loaded"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "cannot be loaded"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "has no chat template"),
        (lambda folder: (folder / "merge.partial.json").write_text("{}"), "did not finish"),
        (
            lambda folder: (folder / "merge.json").write_text('{"files": {"config.json": {"size": 1}}}'),
            "config.json has",
        ),
        (shutil.rmtree, "there is no folder"),
    ],
)
def test_incomplete_model_folder_is_refused_with_reason(
    model: Path, tmp_path: Path, change: Any, message: str
) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    change(folder)
    with pytest.raises(ArtifactError, match=message):
        Talk(folder, Options(), print)
