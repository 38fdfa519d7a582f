"""Tests of serving plans by compiling: the worker process, and the cache of its answers."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.program import Program
from recipec.compiler.plan import store
from recipec.compiler.plan.serve.compile import (
    ANSWER,
    WorkerKilled,
    answer,
    compile_program,
    job,
    parse,
    run_worker,
    worker_environment,
)
from recipec.compiler.plan.serve.results import ServeAnswer, ServeJob
from tests.plan.serve_answers import HLO, answered
from tests.waiting import gone


def worker(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> Path:
    """Replace the worker by a program, and return the interpreter."""
    path = folder / "worker.py"
    path.write_text(code)
    monkeypatch.setattr("recipec.compiler.plan.serve.compile.WORKER", path)
    return Path(sys.executable)


def test_worker_reads_its_job_from_stdin_and_its_answer_is_parsed(
    example: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {
        "page_tokens": 16,
        "pages": 10,
        "token_bytes": {"full_attention": 2048.0},
        "depths": [{"layers": 6, "weights": 1, "page": 2, "programs": [{"kind": "decode", "tokens": 64}]}],
        "head": {"kind": "head", "tokens": 64, "text": "head.hlo"},
        "peak_rss": 1,
        "seconds": 2,
    }
    (tmp_path / "head.hlo").write_text(HLO)
    code = "import json, sys; assert json.load(sys.stdin)['topology'] == 'v6e:2x4'"
    code += f"; print({json.dumps(plain)!r})"
    python = worker(tmp_path, monkeypatch, code)
    made = job(example, (6,))
    done = parse(run_worker(python, made, tmp_path, lambda line: None), tmp_path, made)
    assert done.head.timeline.exposed > 0 and done.head.collectives[0].kind == "all-reduce"
    with pytest.raises(ArtifactError, match="cannot be read"):
        parse("nothing", tmp_path, made)


def test_failed_worker_error_quotes_its_last_line(
    example: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = worker(tmp_path, monkeypatch, "raise ValueError('no such head size')")
    with pytest.raises(ArtifactError, match="ValueError: no such head size"):
        run_worker(python, job(example, (6,)), tmp_path, lambda line: None)


def test_worker_that_exceeds_the_timeout_is_ended(
    example: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "pid"
    code = f"import os, time; open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    python = worker(tmp_path, monkeypatch, code)
    with pytest.raises(ArtifactError, match="longer than"):
        run_worker(python, job(example, (6,)), tmp_path, lambda line: None, timeout=1.5)
    assert gone(int(marker.read_text()))


def test_killed_worker_is_retried_with_fewer_layers(
    example: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = worker(tmp_path, monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")

    def run(made: ServeJob, say: Any) -> ServeAnswer:
        if made.layers == (60,):
            run_worker(python, made, tmp_path, say)
        return answered(made)

    said: list[str] = []
    made, _, notes = compile_program(example, True, said.append, run)
    assert made.layers == (6, 12)
    assert "compiling 60 layers was killed by the system" in notes[0] and notes[0] in said

    def always(made: ServeJob, say: Any) -> ServeAnswer:
        raise WorkerKilled

    with pytest.raises(ArtifactError, match="memory ran out"):
        compile_program(example, False, said.append, always)


def test_worker_answers_are_cached_by_job(
    example: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECIPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("recipec.compiler.plan.serve.environment.make", lambda say: Path(sys.executable))
    ran: list[ServeJob] = []

    def fake(python: Path, made: ServeJob, folder: Path, say: Any) -> str:
        ran.append(made)
        return ANSWER.dump_json(answered(made)).decode()

    monkeypatch.setattr("recipec.compiler.plan.serve.compile.run_worker", fake)
    made = job(example, (6, 12))
    first = answer(made, lambda line: None)
    assert answer(made, lambda line: None) == first and len(ran) == 1
    answer(replace(made, kv_cache_dtype="auto"), lambda line: None)
    assert len(ran) == 2
    (kept,) = [p for p in store.folder().rglob("*.json") if '"peak_rss"' in p.read_text()][:1]
    kept.write_text("damaged")
    answer(made, lambda line: None)
    answer(replace(made, kv_cache_dtype="auto"), lambda line: None)
    assert len(ran) == 3


def test_worker_environment_has_job_variables_and_no_pythonpath(
    example: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    made = replace(job(example, (6,)), environment=(("RPA_V3_DECODE_BLOCK_SIZES", "1,1024,1,1024"),))
    environment = worker_environment(made)
    assert "PYTHONPATH" not in environment and "XLA_FLAGS" not in environment
    assert environment["RPA_V3_DECODE_BLOCK_SIZES"] == "1,1024,1,1024"
