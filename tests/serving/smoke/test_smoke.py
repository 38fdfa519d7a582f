"""Tests of smoke on healthy servers, and on weights and adapters without effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipec.runtime.serving import smoke
from recipec.runtime.serving.answers import Scored
from recipec.runtime.serving.client import KEY_VARIABLE
from recipec.runtime.serving.smoke_checks import distance
from tests.ports import free_port
from tests.serving.fake_language import Language
from tests.serving.fake_vllm import Start
from tests.serving.smoke.runs import BOTH, SAME, Run, line, paced


def test_working_adapter_passes_every_check(fake: Start, run: Run, tmp_path: Path) -> None:
    server = fake(BOTH, faults=paced())
    report = tmp_path / "smoke.json"
    status, output = run(server, "--base", "tuned-base", "--vllm", "0.32.0", "--json", report)
    assert output == (
        "ok      ready N s  URL\n"
        "ok      served models N s  tuned, tuned-base\n"
        "ok      version N s  vLLM 0.32.0\n"
        "ok      first request N s  first token after N ms\n"
        "ok      chat completion N s  32 tokens: "
        '"house four down up star bird east queen six ink smith fri..."\n'
        "ok      streaming N s  64 chunks; second request: first token after N ms, then N tokens/s\n"
        "ok      unknown model N s  404\n"
        "ok      differs from base N s  answers to 3 of 3 prompts, log probabilities by up to 3.8 "
        "(tuned-base)\n"
        "8 checks ok in N s\n"
    )
    assert status == 0
    record = json.loads(report.read_text("utf-8"))
    assert record["ok"] is True and record["model"] == "tuned" and record["url"] == server.url
    assert [check["state"] for check in record["checks"]] == ["ok"] * 8
    figures = record["figures"]
    assert 0 < figures["ttft_first_seconds"] < 5 and 0 < figures["ttft_seconds"] < 5
    assert 1 < figures["tokens_per_second"] < 1001
    prompts = record["checks"][-1]["figures"]["prompts"]
    assert [prompt["prompt"] for prompt in prompts] == list(smoke.PROMPTS)
    assert all(one["answer"] != one["base_answer"] for one in prompts)
    # Both models get the same tokens.
    asked = server.bodies("/v1/completions")
    assert [body["model"] for body in asked] == BOTH * 3
    assert all(asked[n]["prompt"] == asked[n + 1]["prompt"] for n in (0, 2, 4))


def test_merged_weights_without_a_base_server_skip_the_comparison(
    fake: Start, run: Run, tmp_path: Path
) -> None:
    write_record(tmp_path)
    status, output = run(fake(faults=paced()), "--weights", tmp_path)
    assert status == 0
    assert line(output, "differs from base") == (
        "- differs from base N s not compared: the endpoint serves only the merged weights\n"
        " = note: to compare, serve the base at another address and give it: --base-url URL\n"
    )
    assert line(output, "merged weights") == (
        "ok merged weights N s step 400's adapters (rank 16, alpha 32) merged into 410 tensors, 77 kept "
        "(merge.json)\n"
    )
    assert output.endswith("8 checks ok in N s\n")


RECORD: dict[str, Any] = {
    "base": {"files": {"a.safetensors": {"size": 1, "sha256": "aa"}}},
    "checkpoint": {"step": 400},
    "lora": {"rank": 16, "alpha": 32.0},
    "tensors": {"merged": 410, "kept": 77},
    "recipe": {"name": "tuned"},
    "files": {"a.safetensors": {"size": 1, "sha256": "bb"}, "config.json": {"size": 1, "sha256": "cc"}},
}


def write_record(folder: Path, **changed: Any) -> None:
    (folder / "merge.json").write_text(json.dumps({**RECORD, **changed}))


SAME_FILES = {"a.safetensors": {"size": 1, "sha256": "aa"}}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tensors": {"merged": 0, "kept": 487}}, "no tensor was merged, so the weights are the base's"),
        ({"lora": {"rank": 16, "alpha": 0}}, "lora.alpha is 0, so the weights are the base's"),
        ({"files": SAME_FILES}, "the files of the weights are the base's, byte for byte"),
        ({"tensors": None}, "is not what merge.py writes"),
        ({"lora": 7}, "is not what merge.py writes"),
        ({"base": {"files": ["a"]}}, "is not what merge.py writes"),
    ],
)
def test_no_op_or_malformed_merge_json_fails_the_merged_weights_check(
    changed: dict[str, Any], said: str, fake: Start, run: Run, tmp_path: Path
) -> None:
    write_record(tmp_path, **changed)
    status, output = run(fake(faults=paced()), "--weights", tmp_path)
    assert status == 1
    found = line(output, "merged weights")
    assert found.startswith(f"FAILED merged weights N s {tmp_path}/merge.json") and said in found
    assert " = help: " in found


def test_missing_or_mismatched_merge_json_is_reported(fake: Start, run: Run, tmp_path: Path) -> None:
    server = fake(faults=paced())
    status, output = run(server, "--weights", tmp_path)
    assert status == 0
    nothing = f"- merged weights N s {tmp_path}/merge.json is missing: how the weights were made is unknown\n"
    assert line(output, "merged weights") == nothing
    write_record(tmp_path, lora=None, recipe={"name": "other"})
    found = line(run(server, "--weights", tmp_path)[1], "merged weights")
    assert "step 400's weights merged into 410 tensors, 77 kept" in found
    assert "= warning: the weights were merged for the recipe `other`, and `tuned` is served" in found
    (tmp_path / "merge.json").write_text("{")
    assert run(server, "--weights", tmp_path)[0] == 1


def test_no_op_adapter_fails_the_comparison(fake: Start, run: Run) -> None:
    server = fake(BOTH, language=Language(seeds=SAME), faults=paced())
    status, output = run(server, "--base", "tuned-base")
    assert status == 1
    assert line(output, "differs from base") == (
        "FAILED differs from base N s the adapter is a no-op: tuned answers as tuned-base does, with the "
        "same log probabilities (within 0.0001, 3 prompts)\n"
        f" = help: {smoke.CAUSES}\n"
    )
    assert output.endswith("1 of 8 checks FAILED in N s\n")


@pytest.mark.parametrize(("shift", "status"), [(-2e-4, 0), (-5e-5, 1)])
def test_comparison_passes_on_log_probability_differences_over_1e_4(
    shift: float, status: int, fake: Start, run: Run
) -> None:
    language = Language(seeds=SAME, shifts={"tuned": shift})
    found = run(fake(BOTH, language=language, faults=paced()), "--base", "tuned-base", "--prompt", "one")
    assert found[0] == status
    if not status:
        assert line(found[1], "differs from base") == (
            "ok differs from base N s only log probabilities, by up to 0.0002 (tuned-base)\n"
            " = note: the greedy answers are the base's: the training changed little, or these prompts are "
            "far from it; name others in serve.smoke_prompts\n"
        )


def test_must_differ_prompt_with_the_base_answer_fails(fake: Start, run: Run) -> None:
    """Require another answer to the recipe's prompts; other log probabilities do not suffice."""
    language = Language(seeds=SAME, shifts={"tuned": -0.02})
    server = fake(BOTH, language=language, faults=paced())
    status, output = run(server, "--base", "tuned-base", "--must-differ", "Who are you?", "--must-differ=-x")
    assert status == 1
    assert line(output, "differs from base") == (
        'FAILED differs from base N s the answer to "Who are you?" and 1 more is the base\'s, and '
        "serve.smoke_prompts says that it differs; log probabilities differ by at most 0.02\n"
        " = help: was it trained long enough? use prompts that the training data answers differently from "
        "the base\n"
    )
    asked = [body["messages"][0]["content"] for body in server.bodies("/v1/chat/completions")]
    assert asked[-2:] == ["Who are you?", "-x"]


def test_base_url_server_is_compared_with_the_served_model(fake: Start, run: Run) -> None:
    server, base = fake(["tuned"], faults=paced()), fake(["adapter", "google/base"])
    status, output = run(server, "--base-url", base.url + "/v1")
    assert status == 0
    found = line(output, "differs from base")
    assert "answers to 3 of 3 prompts" in found and "(google/base)" in found
    assert {body["model"] for body in base.bodies("/v1/completions")} == {"google/base"}


def test_no_op_merge_fails_the_comparison(fake: Start, run: Run) -> None:
    language = Language(seeds={"tuned": "one", "base": "one"})
    server, base = fake(language=language, faults=paced()), fake(["base"], language=language)
    found = line(run(server, "--base-url", base.url)[1], "differs from base")
    assert found.startswith("FAILED differs from base N s the merge is a no-op: tuned answers as base does")
    assert "a wrong or untrained checkpoint was merged, or the server loads the base's folder" in found
    language.shifts["tuned"] = -0.01
    found = line(run(server, "--base-url", base.url)[1], "differs from base")
    assert "= note: two servers of one model may differ by 0.05: this may be no difference at all" in found


def test_base_server_errors_are_reported_and_base_gets_only_its_key(
    fake: Start, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fake(faults=paced())
    closed = f"http://127.0.0.1:{free_port()}"
    found = line(run(server, "--base-url", closed)[1], "differs from base")
    assert f"the base's server: nothing listens at {closed}" in found
    assert (
        "--base-url serves tuned, the model that it is to be compared with"
        in run(server, "--base-url", server.url)[1]
    )
    base = fake(["base"], key="sesame")
    assert (
        "= help: export VLLM_BASE_API_KEY with the key of the base's server"
        in run(server, "--base-url", base.url)[1]
    )
    # Other servers do not get this server's key.
    monkeypatch.setenv(KEY_VARIABLE, "another")
    run(server, "--base-url", base.url)
    assert all(asked.authorization is None for asked in base.asked)
    monkeypatch.setenv(smoke.BASE_KEY_VARIABLE, "sesame")
    assert run(server, "--base-url", base.url)[0] == 0


def test_log_probability_distance_stops_at_the_first_different_token() -> None:
    one = Scored("", [1, 2], [{1: -0.5, 2: -1.0}, {3: -0.5, 4: -1.0}])
    assert distance(one, one, None) == 0
    shifted = Scored("", [1, 2], [{1: -0.5, 2: -1.25}, {3: -0.5, 4: -9.0}])
    assert distance(one, shifted, None) == 8
    # After the first different token, the models have read different texts.
    assert distance(one, shifted, 0) == 0.25
    # A token that is not among the other's likeliest counts as less likely than all of them.
    others = Scored("", [1, 2], [{1: -0.5, 9: -3.0}, {3: -0.5, 4: -1.0}])
    assert distance(one, others, None) == 2.0
