"""Tests of probe.py with a server: the merged miniature's answers against the server's."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipec.runtime.errors import UserError
from recipec.runtime.model.random_weights import write_text_model
from recipec.runtime.probe import served
from recipec.runtime.probe.probe import main
from recipec.runtime.probe.probe_results import digest_of
from recipec.runtime.settings import ModelSettings
from tests.clients.fake_vllm import FakeVllm, Start
from tests.runtime import probed

CONFIG = probed.CONFIG | {"num_hidden_layers": 1}
LOCK = {"recipe": {"name": "tuned", "serve": {}}}


def test_stored_miniature_answers_match_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "NEW", 4)
    write_text_model(tmp_path, CONFIG, seed=3)
    served.keep(tmp_path, ModelSettings(id="tiny", family="qwen3", dtype="bfloat16"), "digest")
    kept = json.loads((tmp_path / served.ANSWERS).read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for one in kept["answers"]:
        whole = torch.tensor([one["prompt"] + one["tokens"]])
        with torch.no_grad():
            logits = model(whole).logits[0, len(one["prompt"]) - 1 : -1].numpy()
        assert logits.argmax(axis=1).tolist() == one["tokens"]
        best = np.sort(logits, axis=1)
        lead = (best[:, -1] - best[:, -2]) / np.sqrt(np.mean(logits**2, axis=1))
        assert one["leads"] == pytest.approx(lead, abs=1e-3)
    assert [len(one["prompt"]) for one in kept["answers"]] == list(served.LENGTHS)
    # The folder that the server loads has a word for each token.
    assert AutoTokenizer.from_pretrained(tmp_path).decode([7, 255]) == "t7 t255"


@pytest.fixture
def kept(fake: Start) -> tuple[FakeVllm, dict[str, Any]]:
    """Start a fake server, and use its answers as the miniature's."""
    server = fake(["tuned"])
    model = served.ServedModel(served.Client(server.url), "tuned", chat=False)
    answers = []
    for length in served.LENGTHS:
        body = {"model": "tuned", "prompt": list(range(5, 5 + length)), "max_tokens": served.NEW}
        came = model.streamed(body | {"temperature": 0, "ignore_eos": True, "return_token_ids": True})
        assert came.tokens is not None
        answers.append({"prompt": body["prompt"], "tokens": came.tokens, "leads": [0.5] * len(came.tokens)})
    return server, {"recipe": digest_of(LOCK), "answers": answers}


def test_server_token_may_differ_only_at_a_near_tie(kept: tuple[FakeVllm, dict[str, Any]]) -> None:
    server, answers = kept
    found, problems = served.ask(server.url, "tuned", answers)
    assert (found["answers"], found["same"], problems) == (4, 4, [])
    assert found["first_token_seconds"] > 0 and 0 < found["token_seconds"] < 1
    other = deepcopy(answers)
    for number, lead in ((1, served.TIE - 0.01), (2, served.TIE + 0.01)):
        other["answers"][number]["tokens"][3] += 1
        other["answers"][number]["leads"][3] = lead
    found, problems = served.ask(server.url, "tuned", other)
    assert found["same"] == 2
    assert problems == [
        "the server's answer 3 differs from the merged miniature's at token 4, which leads by 0.26 there "
        "(allowed 0.25)"
    ]


def test_probe_compares_the_server_with_the_stored_answers(
    kept: tuple[FakeVllm, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, answers = kept
    (tmp_path / "recipe.lock.json").write_text(json.dumps(LOCK), encoding="utf-8")
    mini = tmp_path / "mini"
    mini.mkdir()
    (mini / served.ANSWERS).write_text(json.dumps(answers), encoding="utf-8")
    probe = {"probe": 1, "recipe": answers["recipe"], "time": {"parts": {}}, "problems": ["the server's old"]}
    (tmp_path / "probe.json").write_text(json.dumps(probe), encoding="utf-8")
    assert main(tmp_path, ["--merged", str(mini), "--server", server.url]) == 0
    told = json.loads((tmp_path / "probe.json").read_text(encoding="utf-8"))
    assert told["server"]["same"] == 4 and told["time"] == {"parts": {}} and told["problems"] == []
    assert "greedy answers         4                   4 the same" in capsys.readouterr().out
    # Other models are only timed.
    assert main(tmp_path, ["--server", server.url]) == 0
    assert "not compared" in capsys.readouterr().out
    answers["answers"][0]["tokens"][0] += 1
    (mini / served.ANSWERS).write_text(json.dumps(answers), encoding="utf-8")
    assert main(tmp_path, ["--merged", str(mini), "--server", server.url]) == 1
    told = json.loads((tmp_path / "probe.json").read_text(encoding="utf-8"))
    assert told["problems"][0].startswith("the server's answer 1 differs")


@pytest.mark.parametrize(
    ("kept_text", "message"),
    [
        (None, "holds no merged miniature"),
        ("{", "holds no merged miniature"),
        ("[]", "holds no merged miniature"),
        ('{"recipe": "other", "answers": []}', "the miniature of another recipe"),
    ],
)
def test_missing_or_other_recipes_miniature_gives_an_error(
    kept_text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.lock.json").write_text(json.dumps(LOCK), encoding="utf-8")
    if kept_text is not None:
        (tmp_path / served.ANSWERS).write_text(kept_text, encoding="utf-8")
    asked = ["--merged", str(tmp_path), "--server", "http://127.0.0.1:1"]
    assert main(tmp_path, asked) == 1
    assert message in capsys.readouterr().err
    with pytest.raises(UserError, match="nothing listens"):
        served.ask("http://127.0.0.1:1", "tuned", None)
