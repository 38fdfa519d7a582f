"""Tests of reward functions in processes of their own: how they are called, and how they fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipec.runtime.errors import UserError
from recipec.runtime.reinforcement.rewards import Rewards
from recipec.runtime.settings import Reward
from tests.conftest import ROOT
from tests.refusals import refusal
from tests.waiting import gone, running, until

MEMORY = 512 * 2**20
PROMPTS = [[{"role": "user", "content": f"What is {n} + 1?"}] for n in range(3)]
COMPLETIONS = [[{"role": "assistant", "content": str(n + 1)}] for n in range(3)]
IDS = [[n, 1] for n in range(3)]
COLUMNS = {"answer": ["1", "2", "5"]}


def written(folder: Path, source: str) -> Reward:
    (folder / "scores.py").write_text(source)
    return Reward("score", str(folder / "scores.py"))


def scored(rewards: Rewards, columns: Any = COLUMNS) -> list[list[float | None]]:
    return rewards.score(PROMPTS, COMPLETIONS, IDS, columns)


def test_functions_are_called_as_trl_calls_them_in_processes_that_stay(tmp_path: Path) -> None:
    """Compare all arguments; kinds of numbers; None; a function of coroutines; and what is printed."""
    (tmp_path / "sibling.py").write_text("RIGHT = True\n")
    (tmp_path / "json.py").write_text(
        "import os, sys, numpy, sibling\n"
        "print('imported')\n"
        "calls = []\n"
        "def right(completions, answer, **rest):\n"
        "    texts = [messages[0]['content'] for messages in completions]\n"
        "    assert sorted(rest) == ['completion_ids', 'prompts']\n"
        "    assert rest['prompts'][2] == [{'role': 'user', 'content': 'What is 2 + 1?'}]\n"
        "    assert rest['completion_ids'] == [[0, 1], [1, 1], [2, 1]]\n"
        "    print('scoring'); os.write(1, b'a line\\n'); os.system('echo from a shell >&2')\n"
        "    sys.stdin.read()\n"
        "    return [sibling.RIGHT if a == b else None for a, b in zip(texts, answer)]\n"
        "async def count(**rest):\n"
        "    calls.append(1)\n"
        "    return numpy.array([len(calls), os.getpid(), 0.5], 'float32')\n"
    )
    file = str(tmp_path / "json.py")
    notes: list[str] = []
    with Rewards([Reward("right", file), Reward("count", file)], 20, MEMORY, notes.append) as rewards:
        first, counted = scored(rewards)
        assert first == [1.0, 1.0, None]
        assert counted[0] == 1 and counted[2] == 0.5
        assert scored(rewards) == [first, [2, counted[1], 0.5]]
        assert rewards.score([], [], [], {}) == [[], []]
        pid = int(counted[1] or 0)
    assert gone(pid)
    assert sorted(notes) == [
        f'note: reward json.py:{name} printed "imported"; its later output is not shown'
        for name in ("count", "right")
    ]


FAILURES = {
    "raise": (
        "    return [1 / (p[0]['content'] != 'What is 1 + 1?') for p in prompts]",
        "raised ZeroDivisionError: division by zero (scores.py:2), for a completion of the prompt "
        '"What is 1 + 1?"',
        "let it return None for a completion that it cannot score",
    ),
    "raise-for-all": (
        "    if len(prompts) > 1: raise KeyError('x')\n    return [0.0]",
        "raised KeyError: 'x' (scores.py:2), for 3 completions, the first of the prompt \"What is 0 + 1?\"",
        "correct the function",
    ),
    "exit": ("    import sys; sys.exit('bye')", "raised SystemExit: bye", "correct the function"),
    "nan": (
        "    return [0.0, float('nan'), 0.0]",
        'returned nan, which is not a finite number, for a completion of the prompt "What is 1 + 1?"',
        "return a finite number, or None",
    ),
    "infinity": ("    return [0, 1, 10 ** 400]", "which is not a finite number", "return a finite number"),
    "count": ("    return [0.0, 1.0]", "returned 2 scores for 3 completions", "for each completion"),
    "scalar": ("    return 0.5", "returned a value of type float (0.5) instead of a list", "return a list"),
    "nothing": ("    pass", "returned None instead of a list", "return a list"),
    "text": ("    return 'abc'", "returned a value of type str ('abc') instead of a list", "return a list"),
    "texts": (
        "    return [0.0, 'good', 1.0]",
        "returned a value of type str ('good') instead of a number",
        "return a list",
    ),
    "column": (
        "    import numpy; return numpy.zeros((3, 1))",
        "returned a value of type ndarray (array([0.])) instead of a number",
        "return a list",
    ),
    "memory": ("    bytearray(10 ** 10)", "ran out of memory", "its limit is 512 MiB"),
    "signal": (
        "    import ctypes; print('about to fail'); ctypes.string_at(0)",
        'was killed by SIGSEGV while it scored 3 completions, the first of the prompt "What is 0 + 1?"',
        "a library that it calls has a fault",
    ),
    "end": (
        "    import os; os.system('echo last words'); os._exit(3)",
        "ended its process with exit status 3 while it scored 3 completions, the first of the prompt "
        '"What is 0 + 1?"; it last printed "last words"',
        "instead of calling os._exit",
    ),
    "hang": (
        "    while True: pass",
        "did not finish in 1 s while it scored 3 completions, the first of the prompt",
        "raise its time limit",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failure_names_function_prompt_and_way_out(name: str, tmp_path: Path) -> None:
    """The same functions can be used afterwards: a process that ended starts again."""
    body, message, help = FAILURES[name]
    reward = written(tmp_path, f"def score(prompts, **columns):\n{body}\n")
    with Rewards([reward], 1 if name == "hang" else 20, MEMORY, lambda _: None) as rewards:
        for _ in range(2 if name in ("raise", "end") else 1):
            error = refusal(lambda: scored(rewards))
            assert error.message.startswith("reward scores.py:score ")
            assert message in error.message and help in (error.help or "")


STARTS = {
    "no file": (None, "score", "the file scores.py does not exist"),
    "no function": ("def scores(**k): pass", "score", "has no function score", "did you mean scores?"),
    "constant": ("score = 3", "score", "is not a function"),
    "no package": (
        "import time\nimport a_missing_package",
        "score",
        "cannot be imported: ModuleNotFoundError: No module named 'a_missing_package' (scores.py:2)",
        "install a_missing_package",
    ),
    "syntax": ("def score(:", "score", "cannot be imported: SyntaxError"),
    "exit": ("exit(1)", "score", "cannot be imported: SystemExit: 1 (scores.py:1)"),
}


@pytest.mark.parametrize("name", STARTS)
def test_functions_that_cannot_be_imported(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source, function, message, *help = STARTS[name]
    if source is not None:
        Path("scores.py").write_text(source)
    with Rewards([Reward(function, "scores.py")], 20, MEMORY) as rewards:
        error = refusal(rewards.start)
    assert error.message.startswith("reward scores.py:score") and message in error.message
    assert error.help and (not help or help[0] in error.help)


@pytest.mark.parametrize(
    ("signature", "message"),
    [
        ("completions, answer", "cannot be called: got an unexpected keyword argument 'prompts'"),
        ("solution, **columns", "missing a required argument: 'solution'; its arguments are prompts, "),
    ],
)
def test_parameters_that_do_not_fit_the_data(signature: str, message: str, tmp_path: Path) -> None:
    reward = written(tmp_path, f"def score({signature}):\n    return []\n")
    with Rewards([reward], 20, MEMORY) as rewards:
        error = refusal(lambda: scored(rewards))
    assert message in error.message and "def score(completions, **columns)" in (error.help or "")


def test_column_with_the_name_of_an_argument_is_refused(tmp_path: Path) -> None:
    with Rewards([written(tmp_path, "")], 20, MEMORY) as rewards:
        assert "a column completions" in refusal(lambda: scored(rewards, {"completions": []})).message


def test_ready_rewards_and_their_mistakes() -> None:
    columns = {**COLUMNS, "pattern": ["1", "x", "3"]}

    def error(*arguments: Any) -> UserError:
        with Rewards([Reward(*arguments)], 1, MEMORY) as rewards:
            return refusal(lambda: scored(rewards, columns))

    with Rewards(
        [Reward("exact_match", None, "answer"), Reward("length", None, None, {"maximum": 1})], 20, MEMORY
    ) as rewards:
        assert scored(rewards) == [[1.0, 1.0, 0.0], [0.5, 0.5, 0.5]]
    assert error("exact_macth").help == "did you mean exact_match?"
    assert "needs the column" in error("numeric_match").message
    assert "no column answers" in error("numeric_match", None, "answers").message
    assert error("numeric_match", None, "answers").help == "did you mean answer?"
    assert "'x' has no number" in error("numeric_match", None, "pattern").message
    assert error("length", None, None, {"max": 3}).help == "its options: maximum, minimum"
    assert "wrong pattern '('" in error("format_match", None, None, {"pattern": "("}).message


def test_catastrophic_pattern_is_ended_by_the_time_limit() -> None:
    with Rewards([Reward("format_match", None, None, {"pattern": "(a+)+b"})], 1, MEMORY) as rewards:
        error = refusal(lambda: rewards.score(["?"], ["a" * 40], [[1]], {}))
    assert "reward format_match did not finish in 1 s" in error.message
    assert "slow regular expression" in (error.help or "")


PROGRAM = """
import sys
from recipec.runtime.interrupts import Interrupted, Interrupts
from recipec.runtime.reinforcement.rewards import Rewards
from recipec.runtime.settings import Reward
with Interrupts():
    try:
        with Rewards([Reward("score", sys.argv[1])], 600, 2**29) as rewards:
            rewards.score(["?"], ["!"], [[1]], {})
    except Interrupted:
        print("interrupted")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_the_run_and_take_their_children_with_them(number: int, tmp_path: Path) -> None:
    """A child has left the process group; the function does not react to anything."""
    reward = written(
        tmp_path,
        "import os, pathlib, re, subprocess\n"
        "def score(**columns):\n"
        "    child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"    path = pathlib.Path({str(tmp_path)!r})\n"
        "    (path / 'new').write_text(f'{os.getpid()} {child.pid} {os.getppid()}')\n"
        "    (path / 'new').rename(path / 'numbers')\n"
        "    re.fullmatch('(a+)+b', 'a' * 60)\n",
    )
    run = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(reward.file)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    until((tmp_path / "numbers").exists, 60)
    processes = [int(text) for text in (tmp_path / "numbers").read_text().split()]
    assert all(map(running, processes))
    os.kill(run.pid, number)
    output, _ = run.communicate(timeout=60)
    assert output == ("" if number == signal.SIGKILL else "interrupted\n")
    assert all(map(gone, processes))
