"""Check a new server as its clients use it: python3 -m runtime.serving.smoke --url URL --model NAME

It prints a line for each check. Exit status: 0 all checks passed, 1 one failed, 2 wrong usage, 130 after
Ctrl-C. The server's API key comes from VLLM_API_KEY, the key for --base-url from VLLM_BASE_API_KEY.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from ..errors import UserError, report
from ..progress import duration
from . import smoke_checks
from .answers import ServedModel
from .client import KEY_VARIABLE, NO_HOST, REFUSED, Client, ServerError, timeout_seconds
from .files import write_whole
from .findings import CheckFailed, Finding, Findings, Stopped

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
    client = Client(arguments.url, timeout=arguments.timeout)
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
    findings.check("unknown model", lambda: smoke_checks.unknown(model))
    findings.check("differs from base", lambda: _difference(model, arguments))
    if arguments.weights is not None:
        findings.check("merged weights", lambda: merged(arguments.weights, name))


def _ready(client: Client, minutes: float) -> Finding:
    waited = Waited()
    try:
        seconds = wait(client, minutes, waited)
    finally:
        waited.end()
    return Finding(client.url, figures={"wait_seconds": round(seconds, 3)})


def _difference(tuned: ServedModel, arguments: argparse.Namespace) -> Finding:
    prompts = [(prompt, True) for prompt in arguments.must_differ] + [(p, False) for p in arguments.prompt]
    prompts = prompts or [(prompt, False) for prompt in PROMPTS]
    if arguments.base_url is None:
        if arguments.base is None:
            return Finding(
                "not compared: the endpoint serves only the merged weights",
                notes=("to compare, serve the base at another address and give it: --base-url URL",),
                made=False,
            )
        return smoke_checks.differs(
            tuned, ServedModel(tuned.client, arguments.base), prompts, "adapter", CAUSES
        )
    other = Client(arguments.base_url, os.environ.get(BASE_KEY_VARIABLE, ""), arguments.timeout)
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
    add("--url", required=True, help="the server's address, http://HOST:PORT")
    add("--model", required=True, metavar="NAME", help="the name that the fine-tuned model is served by")
    add("--base", metavar="NAME", help="the name that its base is served by at the same address")
    add("--base-url", metavar="URL", help="a server of the base, to compare answers with")
    add("--weights", type=Path, metavar="DIR", help=f"the merged weights; their {RECORD} is read")
    add("--text", action="store_true", help="the model has no chat template: prompts are continued")
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


PAUSES = (0.2, 0.5, 1.0, 2.0)
"""Seconds between attempts; the last value repeats."""

ANSWER_SECONDS = 10.0
"""The timeout of one attempt, in seconds."""

HOPELESS = (400, 401, 403, 404)
"""Statuses of /health that waiting does not change: the server is not vLLM."""

Say = Callable[[float, str], None]
"""Called at every attempt with the seconds so far and the reason for waiting."""


def wait(client: Client, minutes: float, say: Say) -> float:
    """Ask /health until it answers.

    Args:
        minutes: how long to wait at most.

    Returns:
        The seconds that it took.

    Raises:
        UserError: /health did not answer within `minutes`, or never will: the host is unknown, or the server
            answered before and no longer listens.
    """
    started = time.monotonic()
    asking = client.within(ANSWER_SECONDS)
    answered = False
    number = 0
    while True:
        try:
            asking.text("/health")
            return time.monotonic() - started
        except ServerError as error:
            last = error
        if last.kind == REFUSED and answered:
            raise UserError(
                f"the server at {client.url} answered earlier, but nothing listens there now",
                "look at its log: docker compose logs vllm",
            )
        if last.kind == NO_HOST or last.status in HOPELESS:
            raise last
        answered = answered or last.kind != REFUSED
        seconds = time.monotonic() - started
        if seconds >= minutes * 60:
            raise _given_up(client, minutes, last, answered)
        say(seconds, _waited_for(last))
        pause = PAUSES[min(number, len(PAUSES) - 1)]
        time.sleep(min(pause, max(0.0, minutes * 60 - seconds)))
        number += 1


def _given_up(client: Client, minutes: float, last: ServerError, answered: bool) -> UserError:
    if not answered:
        return UserError(
            f"nothing listens at {client.url} after {minutes:g} min",
            "check that the server is started, and whether it is still loading: docker compose ps; docker "
            "compose logs vllm",
        )
    return UserError(
        f"the server is not ready after {minutes:g} min: {last.message}",
        "look at its log: docker compose logs vllm",
    )


def _waited_for(error: ServerError) -> str:
    if error.kind == REFUSED:
        return "nothing listens yet (loading and compiling, or not started: docker compose logs vllm)"
    if error.status == 503:
        return "the server listens, and its engine is not ready (503)"
    return error.message


class Waited:
    """Shows that it is waiting: one line that is rewritten on a terminal, elsewhere a line per interval.

    Args:
        interval: seconds between lines if the stream is not a terminal.
    """

    def __init__(self, stream: TextIO | None = None, interval: float = 30.0) -> None:
        self.stream = stream or sys.stderr
        self.terminal = self.stream.isatty()
        self.interval = interval
        self.next = 0.0
        self.reason = ""
        self.width = 0

    def __call__(self, seconds: float, reason: str) -> None:
        line = f"waiting for the server, {duration(seconds)}: {reason}"
        if self.terminal:
            # A line that wraps cannot be rewritten.
            line = line[: shutil.get_terminal_size().columns - 1]
            self.stream.write("\r" + line.ljust(self.width))
            self.width = len(line)
        elif seconds >= self.next or reason != self.reason:
            self.stream.write(line + "\n")
            self.next = seconds + self.interval
        self.reason = reason
        self.stream.flush()

    def end(self) -> None:
        """Erase the line."""
        if self.terminal and self.width:
            self.stream.write("\r" + " " * self.width + "\r")
            self.stream.flush()
            self.width = 0


RECORD = "merge.json"


def merged(folder: Path, name: str) -> Finding:
    """Describe what was merged into the weights in `folder`.

    Args:
        name: of the served recipe.

    Raises:
        CheckFailed: nothing was merged, or merge.json does not have the form that merge.py writes.
    """
    path = folder / RECORD
    try:
        record = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return Finding(f"{path} is missing: how the weights were made is unknown", made=False)
    except OSError as error:
        return Finding(f"{path} is not readable: {error.strerror}", made=False)
    except (ValueError, RecursionError):
        raise _wrong(path) from None
    try:
        tensors, step, recipe = record["tensors"], record["checkpoint"]["step"], record["recipe"]["name"]
        changed, kept = int(tensors["merged"]), int(tensors["kept"])
        described = _described(record["lora"])
        same = _same_files(record)
        scale = record["lora"] is None or record["lora"]["alpha"]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise _wrong(path) from None
    if not changed:
        raise CheckFailed(
            f"{path}: no tensor was merged, so the weights are the base's", "merge again: merge.py"
        )
    if not scale:
        raise CheckFailed(
            f"{path}: lora.alpha is 0, so the weights are the base's", "train with an alpha above 0"
        )
    if same:
        raise CheckFailed(
            f"{path}: the files of the weights are the base's, byte for byte",
            "was the right checkpoint merged? an untrained adapter changes nothing",
        )
    warnings = []
    if recipe is not None and recipe != name:
        warnings.append(f"the weights were merged for the recipe `{recipe}`, and `{name}` is served")
    text = f"step {step}'s {described} merged into {changed} tensors, {kept} kept (merge.json)"
    return Finding(text, warnings=tuple(warnings), figures={"merged": changed, "kept": kept, "step": step})


def _described(lora: dict[str, Any] | None) -> str:
    return "weights" if lora is None else f"adapters (rank {lora['rank']}, alpha {lora['alpha']:g})"


def _same_files(record: dict[str, Any]) -> bool:
    """Return whether every file of the base's weights is present and unchanged; False without hashes."""
    base, files = record["base"]["files"], record["files"]
    return bool(base) and all(
        "sha256" in known and files.get(file, {}).get("sha256") == known["sha256"]
        for file, known in base.items()
    )


def _wrong(path: Path) -> CheckFailed:
    return CheckFailed(f"{path} is not what merge.py writes", "merge again, or remove the file")


if __name__ == "__main__":
    sys.exit(main())
