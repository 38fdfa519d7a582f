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
from recipec.compiler.trained.chat import Options, Talk
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
