"""Check a new server as its clients use it: python3 -m runtime.clients.smoke --url URL --model NAME

In place of a server's address, a folder of weights can be given. The model is then loaded in this process,
with the packages that train. It prints a line for each check. Exit status: 0 all checks passed, 1 one failed,
2 wrong usage, 130 after Ctrl-C. The server's API key comes from VLLM_API_KEY, the key for --base-url from
VLLM_BASE_API_KEY.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError, report
from ..progress import duration
from . import smoke_checks
from .answers import ServedModel
from .client import KEY_VARIABLE, NO_HOST, Client, ServerError, connect, serves_base, timeout_seconds
from .findings import Finding, Findings, Stopped
from .output_files import write_whole

BASE_KEY_VARIABLE = "VLLM_BASE_API_KEY"

PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Explain in two sentences what a compiler does.",
)
"""The prompts to use when the recipe names none."""

CAUSES = (
    "an untrained or wrong checkpoint was exported, lora_alpha is 0, or another folder than this recipe's "
    "adapter is mounted: look at adapter_config.json, and at the model's root in /v1/models"
)
MERGE_CAUSES = (
    "a wrong or untrained checkpoint was merged, or the server loads the base's folder: look at merge.json, "
    "and at the model's root in /v1/models"
)

ANSWER_SECONDS = 10.0
"""The timeout of one request to /health, in seconds."""

PAUSE_SECONDS = 1.0
TELL_SECONDS = 30.0

HOPELESS = (400, 401, 403, 404)
"""Statuses of /health that waiting does not change: the server is not vLLM."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    for stream in (sys.stdout, sys.stderr):
        # Answers can hold characters that the terminal's encoding lacks.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        return _smoke(arguments)
    except UserError as error:
        report(error)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has closed the pipe; Python would report an error for the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _smoke(arguments: argparse.Namespace) -> int:
    started = time.monotonic()
    if not serves_base(arguments.url):
        arguments.base = None
    client = connect(arguments.url, arguments.timeout, name=arguments.model, base=arguments.base)
    if client.local:
        arguments.api_key = False
    if arguments.api_key and not client.has_key:
        raise UserError(
            "the recipe's server is open to other machines and requires a key",
            f"export {KEY_VARIABLE} with the key that the server was started with",
        )
    findings = Findings(sys.stdout)
    try:
        _checks(findings, client, arguments)
        stopped = False
    except Stopped:
        stopped = True
    seconds = time.monotonic() - started
    checks = sum(check["state"] != "-" for check in findings.checks)
    if findings.failed:
        rest = "; the checks after it were not made" if stopped else ""
        print(f"{findings.failed} of {checks} checks FAILED in {seconds:.1f} s{rest}")
    else:
        print(f"{checks} checks ok in {seconds:.1f} s")
    if arguments.json:
        _write(arguments.json, client, arguments, findings, seconds)
    return 1 if findings.failed else 0


def _checks(findings: Findings, client: Client, arguments: argparse.Namespace) -> None:
    name, base = arguments.model, arguments.base
    model = ServedModel(client, name, chat=not arguments.text)
    findings.check("ready", lambda: _ready(client, arguments.wait), essential=True)
    findings.check("served models", lambda: smoke_checks.served(client, name, base), essential=True)
    findings.check("version", lambda: smoke_checks.version(client, arguments.vllm))
    if arguments.api_key or client.has_key:
        findings.check("API key", lambda: smoke_checks.key(model, arguments.api_key))
    answers = smoke_checks.SmokeAnswers(model)
    findings.check("first request", answers.first_request)
    findings.check("chat completion" if model.chat else "completion", answers.completion)
    findings.check("streaming", answers.streaming)
    if arguments.picture and not client.local:
        findings.check("picture", lambda: smoke_checks.picture(model))
    findings.check("unknown model", lambda: smoke_checks.unknown(model))
    findings.check("differs from base", lambda: _difference(model, arguments))


def _ready(client: Client, minutes: float) -> Finding:
    """Ask /health until it answers, and say from time to time why it does not.

    Args:
        minutes: how long to wait at most.

    Raises:
        UserError: /health did not answer within `minutes`, or never will.
    """
    started = time.monotonic()
    told, told_at = "", 0.0
    while True:
        try:
            client.within(ANSWER_SECONDS).text("/health")
            seconds = time.monotonic() - started
            return Finding(client.url, figures={"wait_seconds": round(seconds, 3)})
        except ServerError as error:
            last = error
        seconds = time.monotonic() - started
        if last.kind == NO_HOST or last.status in HOPELESS:
            raise last
        if seconds >= minutes * 60:
            raise UserError(
                f"the server is not ready after {minutes:g} min: {last.message}",
                "look at its log: docker compose logs vllm",
            )
        if last.message != told or seconds >= told_at + TELL_SECONDS:
            told, told_at = last.message, seconds
            print(f"waiting for the server, {duration(seconds)}: {told}", file=sys.stderr, flush=True)
        time.sleep(min(PAUSE_SECONDS, max(0.0, minutes * 60 - seconds)))


def _difference(tuned: ServedModel, arguments: argparse.Namespace) -> Finding:
    prompts = [(prompt, True) for prompt in arguments.must_differ] + [(p, False) for p in arguments.prompt]
    prompts = prompts or [(prompt, False) for prompt in PROMPTS]
    if arguments.base_url is None:
        if arguments.base is None:
            return Finding(
                "not compared: the endpoint serves only the merged weights",
                notes=("to compare, serve the base at another address and give it: --base-url URL",),
                checked=False,
            )
        return smoke_checks.differs(
            tuned, ServedModel(tuned.client, arguments.base), prompts, "adapter", CAUSES
        )
    other = connect(arguments.base_url, arguments.timeout, os.environ.get(BASE_KEY_VARIABLE, ""))
    try:
        base = ServedModel(other, smoke_checks.base_model(other))
    except ServerError as error:
        if error.status == 401:
            raise UserError(
                error.message, f"export {BASE_KEY_VARIABLE} with the key of the base's server"
            ) from None
        raise UserError(f"the base's server: {error.message}", error.help) from None
    if other.url == tuned.client.url and base.name == tuned.name:
        raise UserError(
            f"--base-url serves {base.name}, the model that it is to be compared with",
            "give the address of a server of the base model",
        )
    what, causes = ("merge", MERGE_CAUSES) if arguments.base is None else ("adapter", CAUSES)
    return smoke_checks.differs(tuned, base, prompts, what, causes)


def _write(
    path: Path, client: Client, arguments: argparse.Namespace, findings: Findings, seconds: float
) -> None:
    """Write the outcome as JSON; `figures` repeats the figures of all checks."""
    figures: dict[str, Any] = {}
    for check in findings.checks:
        figures |= {
            key: value for key, value in check.get("figures", {}).items() if isinstance(value, (int, float))
        }
    record = {
        "smoke": 1,
        "url": client.url,
        "model": arguments.model,
        "ok": not findings.failed,
        "seconds": round(seconds, 3),
        "figures": figures,
        "checks": findings.checks,
    }
    write_whole(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="smoke",
        description="Checks a vLLM server with its clients' requests: one line for each check.",
        epilog=f"The server's key comes from {KEY_VARIABLE}, that of --base-url from {BASE_KEY_VARIABLE}.",
    )
    add = parser.add_argument
    add("--url", required=True, help="the server's address, http://HOST:PORT, or a folder of weights")
    add("--model", required=True, metavar="NAME", help="the name that the fine-tuned model is served by")
    add("--base", metavar="NAME", help="the name that its base is served by at the same address")
    add("--base-url", metavar="URL", help="a server or folder of the base, to compare answers with")
    add("--text", action="store_true", help="the model has no chat template: prompts are continued")
    add("--picture", action="store_true", help="also ask about a picture; a folder is not asked")
    add("--vllm", metavar="VERSION", help="the version of vLLM that the recipe's flags were checked against")
    add("--api-key", action="store_true", help=f"the server requires a key: {KEY_VARIABLE} must hold it")
    several: dict[str, Any] = {"action": "append", "default": [], "metavar": "PROMPT"}
    add("--must-differ", **several, help="the answers to it must differ; again for more prompts")
    add("--prompt", **several, help="the answers to it are compared; again for more prompts")
    add("--wait", type=_time, default=30.0, metavar="MINUTES", help="until it is ready (default: 30)")
    add("--timeout", type=timeout_seconds, default=300.0, metavar="SECONDS", help="default: 300")
    add("--json", type=Path, metavar="FILE", help="where the outcome is written for programs")
    return parser.parse_args(argv)


def _time(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError(text)
    return value


if __name__ == "__main__":
    sys.exit(main())
