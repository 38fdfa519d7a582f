"""Tests of smoke as a command: keys, waiting for a server, its arguments, and its end."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from recipec.runtime.serving import smoke
from recipec.runtime.serving.client import KEY_VARIABLE
from recipec.runtime.serving.smoke import Waited
from tests.ports import free_port
from tests.serving.fake_faults import Faults
from tests.serving.fake_language import Language
from tests.serving.fake_vllm import Start
from tests.serving.smoke.runs import Run, line, paced

# Keys


def test_api_key_check_tests_server_with_and_without_key(
    fake: Start, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fake(key="sesame", faults=paced())
    status, output = run(server, "--api-key")
    assert (status, output) == (
        1,
        "error: the recipe's server is open to other machines and requires a key\n"
        "  = help: export VLLM_API_KEY with the key that the server was started with\n",
    )
    monkeypatch.setenv(KEY_VARIABLE, "sesame")
    status, output = run(server, "--api-key")
    assert status == 0
    assert line(output, "API key") == (
        "ok API key N s 401 without it\n"
        " = warning: asked for no key: /tokenize, /detokenize, /metrics; let a proxy or a firewall pass only "
        "/v1 and /health\n"
    )
    # Routes with an effect get no request that triggers it.
    strange = [asked for asked in server.asked if not asked.path.startswith(("/v1", "/health", "/version"))]
    assert all(asked.method == "GET" for asked in strange if asked.authorization is None)
    monkeypatch.setenv(KEY_VARIABLE, "tahini")
    status, output = run(server, "--api-key")
    assert status == 1
    assert "= help: the server has another key than VLLM_API_KEY" in line(output, "served models")


def test_open_server_fails_the_api_key_check_if_the_recipe_requires_a_key(
    fake: Start, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "sesame")
    server = fake(faults=paced())
    status, output = run(server, "--api-key")
    assert status == 1
    assert line(output, "API key") == (
        "FAILED API key N s /v1/models without a key is answered\n"
        " = help: start the server with VLLM_API_KEY set: anyone may use it now\n"
    )
    status, output = run(server)
    assert status == 0
    assert line(output, "API key") == "- API key N s the server requires no key, although one is set here\n"


def test_api_key_is_hidden_in_output_and_report(
    fake: Start, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "sesame-4711")
    report = tmp_path / "smoke.json"
    fail = {"/version": 500, "/v1/chat/completions": 500}
    server = fake(key="sesame-4711", faults=Faults(fail=fail, repeat_key=True))
    status, output = run(server, "--api-key", "--json", report)
    assert status == 1 and "Bearer ***" in output
    assert "sesame" not in output and "sesame" not in report.read_text()


# Waiting


def test_closed_port_fails_after_the_wait(run: Run) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    status, output = run(url, "--wait", "0.01")
    assert status == 1
    assert (
        "waiting for the server, 0 s: nothing listens yet (loading and compiling, or not started:" in output
    )
    assert line(output, "ready") == (
        "FAILED ready N s nothing listens at URL after 0.01 min\n"
        " = help: check that the server is started, and whether it is still loading: docker compose ps; "
        "docker compose logs "
        "vllm\n"
    )
    assert "1 of 1 checks FAILED in N s; the checks after it were not made\n" in output


def test_smoke_waits_for_a_loading_server(fake: Start, run: Run) -> None:
    status, output = run(fake(faults=paced(unready=2)))
    assert status == 0
    assert "waiting for the server, 0 s: the server listens, and its engine is not ready (503)\n" in output


def test_unready_server_fails_after_the_wait(fake: Start, run: Run) -> None:
    status, output = run(fake(faults=Faults(unready=10_000)), "--wait", "0.005")
    assert status == 1
    assert "the server is not ready after 0.005 min: URL/health answers 503 Service Unavailable\n" in output


def test_server_that_stops_during_the_wait_ends_the_wait(fake: Start, run: Run) -> None:
    server = fake(faults=Faults(unready=10_000, stop_after=2))
    started = time.monotonic()
    status, output = run(server, "--wait", "10")
    assert status == 1 and time.monotonic() - started < 60
    assert line(output, "ready") == (
        "FAILED ready N s the server at URL answered earlier, but nothing listens there now\n"
        " = help: look at its log: docker compose logs vllm\n"
    )


@pytest.mark.parametrize("status", [401, 404])
def test_health_status_401_or_404_fails_without_waiting(status: int, fake: Start, run: Run) -> None:
    code, output = run(fake(faults=Faults(fail={"/health": status})), "--wait", "0.01")
    assert code == 1 and "waiting for the server" not in output


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_wait_progress_rewrites_one_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out = Terminal()
    waited = Waited(out)
    waited(0.2, "nothing listens yet, and this is a long reason for it")
    waited(65, "503")
    waited.end()
    first, second, last = out.getvalue().split("\r")[1:4]
    assert first == "waiting for the server, 0 s: nothing listens yet, and this i"[:59]
    assert second == "waiting for the server, 1 min 05 s: 503".ljust(59)
    assert last.strip() == "" and "\n" not in out.getvalue()


def test_wait_progress_prints_occasional_lines_without_a_terminal() -> None:
    out = io.StringIO()
    waited = Waited(out, interval=30)
    for seconds in range(0, 65, 5):
        waited(seconds, "503" if seconds < 50 else "refused")
    waited.end()
    assert [line.split(", ")[1] for line in out.getvalue().splitlines()] == [
        "0 s: 503",
        "30 s: 503",
        "50 s: refused",
    ]


# The command


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--url", "http://x"],
        ["--url", "http://x", "--model", "m", "--wait", "soon"],
        ["--wait", "-1"],
        ["--wait", "nan"],
    ],
)
def test_invalid_arguments_are_a_usage_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        smoke.main(arguments)
    assert caught.value.code == 2
    assert "smoke: error: " in capsys.readouterr().err


def test_unwritable_json_report_gives_one_sentence_error(fake: Start, run: Run, tmp_path: Path) -> None:
    status, output = run(fake(faults=paced()), "--json", tmp_path / "none" / "x.json")
    assert status == 1
    assert f"error: {tmp_path}/none/x.json cannot be written: No such file or directory\n" in output


def started(*arguments: str, **keywords: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "runtime.serving.smoke", "--model", "tuned", *arguments]
    return subprocess.Popen(
        command,
        cwd=Path(smoke.__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **keywords,
    )


def test_ctrl_c_ends_the_wait_without_a_traceback(fake: Start) -> None:
    process = started("--url", fake(faults=Faults(unready=10_000)).url)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("waiting for the server")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.endswith("stopped\n") and "Traceback" not in out + err


def test_closed_output_pipe_prints_no_error(fake: Start) -> None:
    """Close the pipe early, as `head -1` does."""
    process = started("--url", fake(faults=paced()).url)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait(60) == 1
    assert error == ""


def test_answers_are_escaped_for_an_ascii_terminal(fake: Start) -> None:
    server = fake(language=Language(script=lambda *_: "Käse \N{SNOWMAN}"), faults=paced())
    process = started("--url", server.url, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    out, err = process.communicate(timeout=60)
    assert "K\\xe4se \\u2603" in out and err == ""
