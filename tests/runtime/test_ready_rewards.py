"""Tests of the ready reward functions, on the shapes of public data sets and on traps."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipec.runtime.reinforcement.ready_rewards import READY_REWARDS, ready_reward
from recipec.runtime.reinforcement.sandbox import Isolation, run_tests
from tests.refusals import refusal

GSM8K = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nIn total she sold 48+24 = <<48+24=72>>72.\n#### 72"
MATH = r"The sum is $\frac{1}{2}+\frac14$, so the answer is $\boxed{\frac{3}{4}}.$"


def scored(name: str, text: Any, answer: Any = None, **options: Any) -> float:
    """Return the score of one completion."""
    column = None if answer is None else "answer"
    reward = ready_reward(name, column, options)
    (score,) = reward(prompts=["?"], completions=[text], completion_ids=[[1, 2, 3]], answer=[answer])
    return score


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        (" Paris\n", "Paris", 1),
        ("paris", "Paris", 0),
        ("Paris.", "Paris", 0),
        ("5", 5, 1),
        ("", "Paris", 0),
        ([{"role": "assistant", "content": "Paris"}], "Paris", 1),
        ([{"role": "assistant", "content": None}], "Paris", 0),
        ([], "Paris", 0),
    ],
)
def test_exact_match(text: Any, answer: Any, score: float) -> None:
    assert scored("exact_match", text, answer) == score


def test_exact_match_without_case() -> None:
    assert scored("exact_match", "paris", "Paris", ignore_case=True) == 1


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("48 + 24 = 72, so 72 clips.", GSM8K, 1),
        ("#### 72\n\nI checked it 3 times.", GSM8K, 1),
        ("It is 71.", GSM8K, 0),
        ("The total is $1,234.50.", "1234.5", 1),
        ("1,234,567", 1234567, 1),
        ("the numbers are 1,2,3", "3", 1),
        ("50%", "50", 1),
        ("50%", "0.5", 1),
        ("50", "50%", 1),
        (r"50\%", "50%", 1),
        ("50", "0.5", 0),
        ("50%", "0.5%", 0),
        ("x = -3.", "-3", 1),
        ("\u22123", "-3", 1),
        ("5-3", "3", 1),
        ("-$5", "-5", 1),
        (r"\frac{1}{3}", "1/3", 1),
        ("0.33", "1/3", 0),
        ("3/0", "3", 0),
        ("1e3", "1000", 1),
        ("1e999999999", "1000", 0),
        ("1e999999999", "1e999999999", 1),
        ("-1e999999999", "1e999999999", 0),
        ("9" * 100_000, "9" * 100_000, 1),
        ("8" * 100_000, "9" * 100_000, 0),
        ("no number", "3", 0),
        ("", "3", 0),
    ],
)
def test_numeric_match(text: str, answer: Any, score: float) -> None:
    assert scored("numeric_match", text, answer) == score


def test_numeric_match_within_a_tolerance() -> None:
    assert scored("numeric_match", "3.14", "3.14159", tolerance=1e-3) == 1
    assert scored("numeric_match", "3.1", "3.14159", tolerance=1e-3) == 0
    assert scored("numeric_match", f"{10**60 + 1}", f"{10**60}", tolerance=0) == 0
    assert "no number" in refusal(lambda: scored("numeric_match", "3", "three")).message
    assert "tolerance is -1" in refusal(lambda: scored("numeric_match", "3", "3", tolerance=-1)).message


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        (r"First \boxed{1}, no: \boxed{\dfrac{3}{4}}", MATH, 1),
        (r"\boxed{0.75}", MATH, 1),
        (r"\boxed{\frac34}", MATH, 1),
        (r"\boxed{\frac{3}{5}}", MATH, 0),
        (r"\frac{3}{4}", MATH, 0),
        (r"\boxed{\left( 1, \frac{\pi}{2} \right)}", r"(1,\frac{\pi}{2})", 1),
        (r"\boxed{\{1,2\}}", r"\{1, 2\}", 1),
        (r"\boxed{5\text{ cm}}", r"5\,\mathrm{cm}", 1),
        (r"\boxed{90^\circ}", "90", 1),
        (r"\boxed{1,000}", "1000", 1),
        (r"\boxed{x+1}", "1+x", 0),
        (r"\boxed{12x}", "12y", 0),
        (r"\boxed{3} and then \boxed{4", "3", 0),
        (r"\boxed{", "3", 0),
        (r"\boxed{}", "", 0),
        (r"\boxed{" * 50_000, "3", 0),
        ("}" * 10 + r"\boxed{3}" + "{" * 10, "3", 1),
        ("", "3", 0),
    ],
)
def test_boxed_answer(text: str, answer: str, score: float) -> None:
    assert scored("boxed_answer", text, answer) == score


def test_format_match() -> None:
    pattern = r"<think>.*</think>\s*<answer>.+</answer>"
    assert scored("format_match", "<think>a\nb</think>\n<answer>3</answer>\n", pattern=pattern) == 1
    assert scored("format_match", "so <think>a</think><answer>3</answer>", pattern=pattern) == 0
    assert scored("format_match", "", pattern=pattern) == 0


def test_length_in_tokens() -> None:
    scores = [
        scored("length", "any", maximum=maximum, minimum=minimum)
        for maximum, minimum in ((3, 3), (2, 0), (12, 6))
    ]
    assert scores == [1, pytest.approx(2 / 3), 0.5]
    assert (
        refusal(lambda: scored("length", "any", maximum=2, minimum=3)).help == "set 0 <= minimum <= maximum"
    )


SCHEMA = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"n": 3}', 1),
        ('```json\n{"n": 3}\n```', 1),
        ('{"n": "3"}', 0),
        ('{"n": 3} and more', 0),
        ('{"n": NaN}', 0),
        ("[" * 100_000, 0),
        ('{"n": ' + "9" * 10_000 + "}", 0),
        ("", 0),
    ],
)
def test_json_schema(text: str, score: float) -> None:
    assert scored("json_schema", text, schema=SCHEMA) == score
    assert scored("json_schema", text, '{"type": "object", "required": ["n"], "$defs": {}}') >= score


def test_wrong_json_schemas_are_refused() -> None:
    def error(**options: Any) -> str:
        return refusal(lambda: scored("json_schema", "{}", **options)).message

    assert "the JSON Schema is wrong: 'word' is not valid" in error(schema={"type": "word"})
    assert "the JSON Schema is wrong" in error(answer="{")
    assert "needs a schema" in error()
    # Nothing is fetched.
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"
        assert "refers to another one" in error(schema={"$ref": address})
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()


TEST_LIST = [
    "assert smallest([3, 1, 2]) == 1",
    "assert smallest([5]) == 5",
    "assert smallest([]) is None",
]
"""A value of MBPP's column test_list."""
RIGHT = "Here it is:\n```python\ndef smallest(values):\n    return min(values) if values else None\n```\n"
PARTLY = "def smallest(values):\n    return min(values)"
TRAPS = {
    "print('passed\\n' * 9)\n": 0,
    "import os; os._exit(0)": 0,
    "raise SystemExit": 0,
    "def smallest(values: return": 0,
    "while True: pass": 0,
    "smallest = bytearray(10 ** 10)": 0,
    "import os\nwhile True: os.write(1, b'x' * 1000)": 0,
    "import ctypes; ctypes.string_at(0)": 0,
    "def smallest(values):\n    return smallest(values)": 0,
    "def smallest(values):\n    exit() if values == [5] else None\n    return min(values)": 1 / 3,
    "": 0,
    "```\nunfinished": 0,
    "```json\n{}\n```": 0,
}


def test_code_passes_tests_in_the_form_of_mbpp() -> None:
    assert scored("code_tests", RIGHT, TEST_LIST) == 1
    assert scored("code_tests", PARTLY, TEST_LIST) == pytest.approx(2 / 3)
    assert scored("code_tests", PARTLY, TEST_LIST, all_tests=True) == 0
    # HumanEval's tests are one text.
    assert scored("code_tests", RIGHT, "\n".join(TEST_LIST)) == 1
    assert scored("code_tests", "x = sqrt(4)", ["assert x == 2"], setup="from math import sqrt") == 1
    assert "are not texts" in refusal(lambda: scored("code_tests", RIGHT, [1])).message


@pytest.mark.parametrize("code", TRAPS)
def test_code_that_ends_hangs_or_cheats_simply(code: str) -> None:
    assert scored("code_tests", code, TEST_LIST, seconds=1) == pytest.approx(TRAPS[code])


def passes(code: str, **more: Any) -> bool:
    """Return whether code raises nothing in the sandbox."""
    return run_tests("", [code], **{"seconds": 5, "memory": 2**28, **more}).passed == [True]


def test_sandbox_keeps_code_from_network_files_processes_and_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system allows it; the standard library, and files in its own folder, work."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    file = tmp_path / "file"
    file.write_text("kept")
    isolation = run_tests("", [], 5, 2**28).isolation
    assert isolation is not None
    assert passes("import json, decimal; open('x', 'w').write('a'); assert open('x').read() == 'a'")
    assert not passes("import numpy")
    assert not passes("import os; os.environ['HF_TOKEN']")
    assert not passes("open('x', 'wb').write(bytes(2**26))")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connects = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
        assert passes(connects) is not isolation.network
    writes = f"import os; os.truncate({str(file)!r}, 0)"
    assert passes(writes) is not isolation.files
    assert (file.read_text() == "kept") is isolation.files
    signals = f"import os, signal; os.kill({os.getpid()}, {int(signal.SIGCONT)})"
    assert passes(signals) is not isolation.signals


def test_code_leaves_no_process_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mark = f"{os.getpid()}.25"
    code = f"import subprocess; subprocess.Popen(['sleep', {mark!r}], start_new_session=True)"
    assert passes(f"{code}; open('x', 'w')")
    assert not list(tmp_path.iterdir())
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if mark.encode() in contents(path)]
    assert not left


def contents(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_missing_protection_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A system without namespaces."""
    tested: Callable[..., Any] = run_tests

    def without(*arguments: Any) -> Any:
        result = tested(*arguments)
        return type(result)(result.passed, Isolation(network=False, files=True, signals=False))

    monkeypatch.setattr("recipec.runtime.reinforcement.ready_rewards.run_tests", without)
    reward = ready_reward("code_tests", "answer", {})
    rows = {"completions": [RIGHT] * 2, "completion_ids": [[1]] * 2, "answer": [TEST_LIST] * 2}
    assert reward(**rows) == [1, 1]
    assert capsys.readouterr().out == (
        "this system does not let the sandbox keep code from: the network, signals to other processes\n"
    )


def test_every_ready_reward_scores_an_empty_completion_with_0() -> None:
    options = {"format_match": {"pattern": "a"}, "json_schema": {"schema": {}}, "length": {"maximum": 3}}
    for name, ready in READY_REWARDS.items():
        reward = ready_reward(name, "answer" if ready.column else None, options.get(name, {}))
        (score,) = reward(completions=[""], completion_ids=[[]], answer=["3"])
        assert score == (name == "length"), name
