"""Measures a server with `vllm bench serve`, one point of the sweep after another.

Each point's JSON is written as soon as the point ends, so an interrupted run continues where it stopped.
A failed point is written with its reason, and the next run measures it again.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from ..errors import UserError, report
from . import bench_report
from .bench_points import LoadPoint, as_json, lacking, parse_rate, read_record, refuse_other_settings, whole
from .bench_report import HourlyPrice, Published
from .bench_runner import Processes, TimedOut, new_folder
from .bench_server import ServerFacts, ServerMachine, ask, look, recipe_settings
from .client import Client, ServerError, positive
from .output_files import guarded, write_whole

CLIENT = (
    *("--backend", "vllm"),
    *("--endpoint", "/v1/completions"),
    *("--dataset-name", "random"),
    *("--random-range-ratio", "0"),
    "--ignore-eos",
    *("--temperature", "0"),
    *("--percentile-metrics", "ttft,tpot,itl,e2el"),
    *("--metric-percentiles", "50,90,99"),
)
"""Flags of vLLM's client that are the same at every point."""

RESULT = "result.json"
HEALTH_SECONDS = 10.0
FAILED = 1


def main(argv: Sequence[str] | None = None, runner: Processes | None = None) -> int:
    """Run the command line and return the exit status.

    Args:
        argv: the arguments without the program's name; None takes the process's.
        runner: where vLLM runs; None follows the arguments.
    """
    return guarded(lambda: _main(argv, runner))


def _main(argv: Sequence[str] | None, runner: Processes | None) -> int:
    sweep = parsed(argv)
    if runner is None:
        prefix = ["docker", "compose", "--file", sweep.compose, "exec", "-T", "vllm"] if sweep.compose else []
        runner = Processes(prefix)
    try:
        with signals(), alone(sweep.results):
            return measure(sweep, runner)
    except SweepInterrupted as stop:
        return 128 + stop.number


def measure(sweep: argparse.Namespace, runner: Processes) -> int:
    """Measure the points that are not measured yet, and write the summary of all points.

    Returns:
        The exit status: 0 when every point is measured.

    Raises:
        UserError: the sweep cannot start.
        SweepInterrupted: raised after the summary of the measured points is written.
    """
    client = Client(sweep.url)
    server, machine = ask(client, sweep.model), look(client.url)
    settings = _settings(sweep, server, machine)
    refuse_other_settings(sweep.results, settings)
    limit = server.max_model_len or sweep.max_model_len
    fits = [p for p in sweep.points if limit is None or p.input_length + sweep.output_length <= limit]
    left_out = [
        f"{point}: with {sweep.output_length:,} out that is more than the {limit:,} tokens of the server"
        for point in sweep.points
        if point not in fits
    ]
    for told in left_out:
        print(f"left out: {told}")
    todo = [point for point in fits if not whole(read_record(_path(sweep, point)))]
    if len(todo) < len(fits):
        print(f"{len(fits) - len(todo)} of {len(fits)} points are already measured, and are kept")
    stopped: UserError | None = None
    try:
        if todo:
            runner.check()
        stopped = _points(sweep, runner, client, settings, server, todo)
    finally:
        failed = _summary(sweep, settings, server, machine, fits, left_out)
    if stopped is not None:
        raise stopped
    if failed:
        print(f"{failed} of {len(fits)} points failed; the same command measures them again", file=sys.stderr)
    return FAILED if failed else 0


def _points(
    sweep: argparse.Namespace,
    runner: Processes,
    client: Client,
    settings: dict[str, Any],
    server: ServerFacts,
    todo: Sequence[LoadPoint],
) -> UserError | None:
    """Measure points until the server dies; return the error in that case, else None."""
    for number, point in enumerate(todo, 1):
        print(f"{number}/{len(todo)} {point}: ", end="", flush=True)
        try:
            record = _measured(sweep, runner, point)
        except SweepInterrupted as stop:
            print("interrupted", flush=True)
            report(UserError(f"stopped by {signal.Signals(stop.number).name}", "finished points are kept"))
            raise
        record |= {"settings": settings, "server": {"url": client.url, **asdict(server)}}
        write_whole(_path(sweep, point), as_json(record))
        print(bench_report.line(record), flush=True)
        if record["failure"] is None:
            continue
        reason = _dead(client)
        if reason is not None:
            return UserError(
                f"the server died at {point}: {reason}; points not begun: {len(todo) - number}",
                "look at its log, start it again, and run the same command again; finished points are kept",
            )
    return None


def _measured(sweep: argparse.Namespace, runner: Processes, point: LoadPoint) -> dict[str, Any]:
    """Measure one point and return its record, without the settings that all points share."""
    seed = sweep.seed if sweep.seed is not None else secrets.randbelow(2**32)
    folder, log = new_folder(), sweep.results / f"{point.name}.log"
    seconds = 60 * sweep.minutes
    if point.rate != "inf":
        seconds += sweep.prompts / float(point.rate)
    result = None
    started = time.time()
    try:
        status = runner.run(folder, _words(sweep, point, folder, seed), log, seconds)
        result = _result(runner.read(folder, RESULT))
        failure = _failure(status, result, log, sweep.prompts, sweep.output_length)
    except TimedOut:
        failure = f"no end within {seconds / 60:.3g} minutes"
    except OSError as error:
        raise UserError(
            f"vllm bench serve does not start: {error}",
            "run it where the vllm of the server is, or its image",
        ) from None
    finally:
        runner.remove(folder)
    return {
        "point": {"input_length": point.input_length, "rate": point.rate},
        "seed": seed,
        "measured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "failure": failure,
        "result": result,
    }


def _words(sweep: argparse.Namespace, point: LoadPoint, folder: str, seed: int) -> list[str]:
    """Return the command that measures a point; it does not contain the key."""
    return [
        *("vllm", "bench", "serve", *CLIENT),
        *("--base-url", sweep.url.rstrip("/")),
        *("--model", sweep.model),
        *("--tokenizer", sweep.tokenizer),
        *("--random-input-len", str(point.input_length)),
        *("--random-output-len", str(sweep.output_length)),
        *("--num-prompts", str(sweep.prompts)),
        *("--request-rate", point.rate),
        *("--seed", str(seed)),
        *("--save-result", "--result-dir", folder, "--result-filename", RESULT),
        "--disable-tqdm",
    ]


def _settings(sweep: argparse.Namespace, server: ServerFacts, machine: ServerMachine) -> dict[str, Any]:
    """Return what a figure depends on, except the point. Results of different settings are not mixed."""
    return {
        "model": sweep.model,
        "output_length": sweep.output_length,
        "prompts": sweep.prompts,
        "client": " ".join(CLIENT),
        "recipe": recipe_settings(sweep.lock),
        "server": {"vllm": server.vllm, "max_model_len": server.max_model_len, "cache": server.cache},
        "machine": machine.identity,
    }


def _summary(
    sweep: argparse.Namespace,
    settings: dict[str, Any],
    server: ServerFacts,
    machine: ServerMachine,
    points: Sequence[LoadPoint],
    left_out: Sequence[str],
) -> int:
    """Write and print the summary; return the number of points without figures."""
    records = [(point, read_record(_path(sweep, point))) for point in points]
    place = bench_report.place(machine, sweep.accelerator, sweep.chips, sweep.machine, sweep.url)
    price = sweep.price if place.is_accelerator else None
    if sweep.own_price is not None:
        price = HourlyPrice(sweep.own_price, "--usd-per-hour")
    summary = bench_report.Measurements(
        model=sweep.model,
        settings=settings,
        server=server,
        place=place,
        price=price,
        published=sweep.published if place.is_accelerator else Published(),
        records=records,
        left_out=left_out,
    ).summary()
    bench_report.write(sweep.results, summary)
    return sum(row["outcome"] != "measured" for row in summary["points"])


def _dead(client: Client) -> str | None:
    """Return why a server does not answer /health, or None if it does."""
    for pause in (1.0, 0.0):
        try:
            client.within(HEALTH_SECONDS).text("/health")
            return None
        except ServerError as error:
            reason = error.message
            time.sleep(pause)
    return reason


def _path(sweep: argparse.Namespace, point: LoadPoint) -> Path:
    return sweep.results / f"{point.name}.json"


POINT_MINUTES = 30.0


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, and combine its points, price and published figures.

    Args:
        argv: the arguments without the program's name; None takes the process's.
    """
    args = _parser().parse_args(argv)
    pairs = (LoadPoint(length, rate) for length in args.input_lengths for rate in args.request_rates)
    args.points = tuple(dict.fromkeys(pairs))
    args.published = Published(args.published_source, tuple(map(dict, args.published)))
    args.price = None if args.usd is None else HourlyPrice(args.usd, args.price_source)
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench",
        description="Measures a server with `vllm bench serve`. An interrupted run continues where it "
        "stopped. VLLM_API_KEY holds the server's key, if it needs one.",
    )
    add = parser.add_argument
    add("--url", required=True, help="of the server: http://HOST:PORT")
    add("--model", required=True, metavar="NAME", help="that the server serves the model by")
    add("--tokenizer", required=True, metavar="DIR", help="of the model, as vLLM's client sees it")
    add("--compose", metavar="FILE", help="compose.yaml whose container vLLM is in; without it, on PATH")
    add("--results", required=True, type=Path, metavar="DIR", help="folder of the results")
    add("--input-lengths", required=True, type=_counts, metavar="N,...", help="tokens of a prompt")
    add("--output-length", required=True, type=positive, metavar="N", help="tokens of an answer")
    add("--request-rates", required=True, type=_rates, metavar="R,...", help="requests/s; inf: all at once")
    add("--prompts", required=True, type=positive, metavar="N", help="requests of each point")
    add("--max-model-len", type=positive, metavar="N", help="tokens, where the server does not tell")
    add("--lock", type=Path, metavar="FILE", help="the artifact's recipe.lock.json")
    add("--accelerator", default="", metavar="NAME", help="that the recipe serves on")
    add("--chips", type=positive, default=0, metavar="N", help="of that accelerator")
    add("--accelerator-usd-per-hour", dest="usd", type=_amount, metavar="X", help="its price")
    add("--price-source", default="", metavar="TEXT", help="where that price is from")
    add("--machine", default="", metavar="NAME", help="what the server runs on, where that cannot be seen")
    add(
        "--usd-per-hour", dest="own_price", type=_amount, metavar="X", help="price of what the server runs on"
    )
    add("--published-source", default="", metavar="TEXT", help="where published figures are from")
    add(
        "--published",
        action="append",
        nargs="+",
        default=[],
        type=bench_report.published_word,
        metavar="KEY=NUMBER",
        help="a published figure to show next to these",
    )
    add(
        "--timeout",
        dest="minutes",
        type=_amount,
        default=POINT_MINUTES,
        metavar="MINUTES",
        help="of a point (%(default)g)",
    )
    add("--seed", type=int, metavar="N", help="of the prompts; by default new ones at every point")
    return parser


def _amount(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _counts(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def _rates(text: str) -> list[str]:
    try:
        return [parse_rate(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


KILLED = 137
"""The exit status of a containerized process that SIGKILL ended."""
REASON_LENGTH = 200


def _result(data: bytes | None) -> dict[str, Any] | None:
    """Parse the JSON that vLLM wrote; None if it is missing or incomplete."""
    try:
        result = json.loads(data or b"", parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None
    return result if isinstance(result, dict) else None


def _failure(
    status: int,
    result: dict[str, Any] | None,
    log: Path,
    prompts: int,
    output_length: int,
) -> str | None:
    """Return why a measurement does not count, or None if it does.

    Args:
        status: the exit status.
        result: what vLLM wrote.
        log: its output.
        prompts, output_length: the requested number of requests, and of tokens per answer.
    """
    if status == KILLED:
        return "vllm bench serve was killed: its container ended, or the machine ran out of memory"
    if status != 0:
        message = _last_words(log)
        how = f"was ended by signal {-status}" if status < 0 else f"ended with exit status {status}"
        return f"vllm bench serve {how}{': ' if message else ''}{message}"
    if result is None:
        return "vllm bench serve ended without a complete result"
    missing = lacking(result)
    if missing is not None:
        return f"vllm bench serve ended without a number for {missing}"
    if result["failed"] or result["completed"] != prompts:
        message = _request_error(log)
        count = prompts - result["completed"]
        return f"{count} of {prompts} requests failed{': ' if message else ''}{message}"
    wanted, got = prompts * output_length, result["total_output_tokens"]
    if got < wanted:
        # vLLM's client counts a request as completed even if its stream ends early.
        return f"answers ended early: {got:,} of {wanted:,} tokens came"
    return None


def _request_error(log: Path) -> str:
    """Return the first failed request's error, "" for none. vLLM prints up to ten of them."""
    match = re.search(r"^Error 0: (.*?)(?=^Error 1: |^tip: |^=+ |\Z)", _text(log), re.DOTALL | re.MULTILINE)
    return _last_line(match[1]) if match else ""


def _last_words(log: Path) -> str:
    """Return the error at the end of a log, or else its last line."""
    text = _text(log)
    errors = re.findall(r"^[\w.]*(?:Error|Exception|Interrupt)\b.*", text, re.MULTILINE)
    return _last_line(errors[-1] if errors else text)


def _text(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 200_000))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = "".join(c if c.isprintable() else " " for c in lines[-1]) if lines else ""
    return line if len(line) <= REASON_LENGTH else line[: REASON_LENGTH - 3] + "..."


class SweepInterrupted(Exception):
    """Ctrl-C, or a signal that asks the process to end.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Create a folder of results, and lock it against a second benchmark.

    Raises:
        UserError: another benchmark holds it, or the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(
            f"{folder} cannot hold results: {error.strerror}", "give another folder with --results"
        ) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise UserError(
            f"another benchmark is writing to {folder}",
            "wait for its end, or give another folder with --results",
        ) from None
    try:
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """Raise SweepInterrupted within the block on signals that ask the process to end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise SweepInterrupted(number)

    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # A signal that the process ignores, for example because of nohup, stays ignored.
    before = {n: signal.signal(n, interrupt) for n in asked if signal.getsignal(n) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    raise SystemExit(main())
