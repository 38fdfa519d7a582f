"""Measures a server with `vllm bench serve`, one point of the sweep after the other.

Each point's JSON is written when the point has ended: a run that was interrupted goes on where it stopped.
A failed point is written with its reason, and measured again by the next run.
"""

from __future__ import annotations

import secrets
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runtime.errors import UserError, guarded, report
from runtime.progress import duration
from runtime.serving import bench_outcome, bench_report
from runtime.serving.bench_guards import Interrupted, alone, signals
from runtime.serving.bench_machine import Machine, look
from runtime.serving.bench_points import (
    Point,
    as_json,
    read_record,
    set_aside,
    whole,
    write_whole,
)
from runtime.serving.bench_published import Published
from runtime.serving.bench_report import Price
from runtime.serving.bench_runner import Processes, Runner, TimedOut, new_folder
from runtime.serving.bench_server import Server, ask, recipe_settings
from runtime.serving.bench_sweep import Sweep, parsed
from runtime.serving.client import Client, ServerError

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


def main(argv: Sequence[str] | None = None, runner: Runner | None = None) -> int:
    """The command line; returns the exit status.

    Args:
        argv: without the program's name; None takes the process's.
        runner: where vLLM is; None takes what the arguments say.
    """
    try:
        return guarded(lambda: _main(argv, runner))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        report(UserError(f"{where}{error.strerror or error}"))
        return FAILED


def _main(argv: Sequence[str] | None, runner: Runner | None) -> int:
    sweep, compose = parsed(argv)
    if runner is None:
        prefix = ["docker", "compose", "--file", compose, "exec", "-T", "vllm"] if compose else []
        runner = Processes(prefix)
    try:
        with signals(), alone(sweep.results):
            return measure(sweep, runner)
    except Interrupted as stop:
        return 128 + stop.number


def measure(sweep: Sweep, runner: Runner) -> int:
    """Measures the points that are not measured yet, and writes the summary of all.

    Returns:
        The exit status: 0 when every point is measured.

    Raises:
        UserError: the sweep cannot begin.
        Interrupted: after the summary of what is measured was written.
    """
    client = Client(sweep.url)
    server, machine = ask(client, sweep.model), look(client.url)
    settings = _settings(sweep, server, machine)
    for told in set_aside(sweep.results, settings):
        print(told)
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
        print(f"{len(fits) - len(todo)} of {len(fits)} points are measured already, and kept")
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
    sweep: Sweep,
    runner: Runner,
    client: Client,
    settings: dict[str, Any],
    server: Server,
    todo: Sequence[Point],
) -> UserError | None:
    """Measures points, and stops where the server has died: returns what to say about that."""
    started = time.monotonic()
    for number, point in enumerate(todo, 1):
        left = time_left(sweep, todo, number - 1, time.monotonic() - started)
        print(f"{number}/{len(todo)} {point}{left}: ", end="", flush=True)
        try:
            record = _measured(sweep, runner, point, server.max_model_len or sweep.max_model_len)
        except Interrupted as stop:
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
                "look at its log, start it again, and run this again: what is measured is kept",
            )
    return None


def time_left(sweep: Sweep, todo: Sequence[Point], done: int, passed: float) -> str:
    """How long the points from `done` on still take, at the pace of those before: " (3 min 05 s left)".

    A point takes the time in which its requests are sent, and what the others took beyond theirs.
    """
    if done == 0:
        return ""
    sent = [0.0 if point.rate == "inf" else sweep.prompts / float(point.rate) for point in todo]
    beyond = max(0.0, passed - sum(sent[:done])) / done
    return f" ({duration(sum(sent[done:]) + beyond * (len(todo) - done))} left)"


def _measured(sweep: Sweep, runner: Runner, point: Point, limit: int | None) -> dict[str, Any]:
    """A point's record, without what it shares with the others.

    Args:
        limit: tokens that the server takes, prompt and answer together; None where nobody knows.
    """
    tokens = point.input_length + sweep.output_length
    full = limit is not None and tokens > limit - bench_outcome.SPARE
    seed = sweep.seed if sweep.seed is not None else secrets.randbelow(2**32)
    folder, log = new_folder(), sweep.results / f"{point.name}.log"
    seconds = 60 * sweep.minutes
    if point.rate != "inf":
        seconds += sweep.prompts / float(point.rate)
    result = None
    started = time.time()
    try:
        status = runner.run(folder, _words(sweep, point, folder, seed), log, seconds)
        result = bench_outcome.parsed(runner.read(folder, RESULT))
        failure = bench_outcome.failure(status, result, log, sweep.prompts, sweep.output_length, full)
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
        "note": bench_outcome.note(result, sweep.prompts, point.input_length) if failure is None else None,
        "result": result,
    }


def _words(sweep: Sweep, point: Point, folder: str, seed: int) -> list[str]:
    """The command; it holds no key."""
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


def _settings(sweep: Sweep, server: Server, machine: Machine) -> dict[str, Any]:
    """All that a figure depends on, but for the point: results of other settings are not mixed with these."""
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
    sweep: Sweep,
    settings: dict[str, Any],
    server: Server,
    machine: Machine,
    points: Sequence[Point],
    left_out: Sequence[str],
) -> int:
    """Writes and prints the summary; returns how many points are without figures."""
    records = [(point, read_record(_path(sweep, point))) for point in points]
    place = bench_report.place(machine, sweep.accelerator, sweep.chips, sweep.machine, sweep.url)
    price = sweep.price if place.is_accelerator else None
    if sweep.own_price is not None:
        price = Price(sweep.own_price, "--usd-per-hour")
    summary = bench_report.summary(
        model=sweep.model,
        settings=settings,
        server=server,
        place=place,
        price=price,
        published=sweep.published if place.is_accelerator else Published(),
        records=records,
        left_out=left_out,
    )
    bench_report.write(sweep.results, summary)
    return sum(row["outcome"] != "measured" for row in summary["points"])


def _dead(client: Client) -> str | None:
    """Why a server does not answer /health; None when it does."""
    for pause in (1.0, 0.0):
        try:
            client.within(HEALTH_SECONDS).text("/health")
            return None
        except ServerError as error:
            reason = error.message
            time.sleep(pause)
    return reason


def _path(sweep: Sweep, point: Point) -> Path:
    return sweep.results / f"{point.name}.json"


if __name__ == "__main__":
    raise SystemExit(main())
