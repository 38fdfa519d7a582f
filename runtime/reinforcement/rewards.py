"""Score completions with reward functions, each in a process of its own.

A function is called as TRL calls it: function(prompts=..., completions=..., completion_ids=..., **columns),
with a list in each argument. It returns a number for each completion, or None for one that it does not score.
A process starts once and scores every step, with limits of time and memory. What it prints is kept apart from
its answers. Every failure is a UserError that names the function.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib.util
import inspect
import json
import math
import os
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import UserError, first_line, printable, say
from ..interrupts import held
from ..settings import REWARD_ARGUMENTS, Reward
from .processes import Answer, Supervised, exchange, limit_memory, read_request, supervise
from .ready_rewards import READY_REWARDS, ready_reward

START_SECONDS = 300.0
"""The time that a process may take to import its function."""
SEARCH_SECONDS = 10.0
"""The time for finding the completion for which a function raises an exception."""
SHOWN_CHARACTERS = 200
"""The most characters of a prompt, or of a printed line, in a message."""

Scores = list[float | None]
"""A number for each completion, or None where the function did not score it."""


class Rewards:
    """Score completions with several functions at the same time. Use it in a `with` block, or close it.

    Args:
        rewards: the functions.
        seconds: the time limit of a call, in which a function scores all completions of a step.
        memory: the limit for each process in bytes.
        tell: is called with a line for each function that prints something.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        seconds: float,
        memory: int,
        tell: Callable[[str], None] = say,
    ) -> None:
        self._rewards, self._seconds, self._memory, self._tell = list(rewards), seconds, memory, tell
        self._processes: dict[int, Supervised] = {}
        self._told: set[int] = set()

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the processes that do not run, and import their functions.

        Raises:
            UserError: a function cannot be imported, or a ready reward has wrong options.
        """
        missing = [number for number in range(len(self._rewards)) if number not in self._processes]
        for number in missing:
            reward = self._rewards[number]
            if reward.file is not None and not Path(reward.file).is_file():
                raise UserError(
                    f"reward {reward.name}: the file {reward.file} does not exist",
                    "correct the path of the reward function",
                )
            # Libraries otherwise start a thread on each core, and reserve memory for each.
            threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
            with held():
                self._processes[number] = Supervised(__name__, env={**threads, **os.environ})
        setups = {number: pickle.dumps((self._rewards[number], self._memory)) for number in missing}
        self._ask(setups, START_SECONDS, ())

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> list[Scores]:
        """Return the scores of each function.

        Args:
            prompts: texts, or lists of messages; the prompt of each completion.
            completions: texts, or lists of messages: [{"role": "assistant", "content": ...}].
            completion_ids: the tokens of each completion.
            columns: values of the data for each completion, by column.

        Raises:
            UserError: a function raised an exception, returned something else than a finite number or None
                for each completion, took too long or too much memory, or its process ended.
        """
        for name in REWARD_ARGUMENTS:
            if name in columns:
                raise UserError(
                    f"the data has a column {name}, which is an argument of every reward function",
                    "rename the column",
                )
        self.start()
        if not completions:
            return [[] for _ in self._rewards]
        arguments = {
            "prompts": list(prompts),
            "completions": list(completions),
            "completion_ids": [list(ids) for ids in completion_ids],
            **{name: list(values) for name, values in columns.items()},
        }
        request = pickle.dumps(arguments)
        answers = self._ask(dict.fromkeys(range(len(self._rewards)), request), self._seconds, prompts)
        return [answers[number]["scores"] for number in range(len(self._rewards))]

    def close(self) -> None:
        """End the processes and everything that they started, even if they are working."""
        while self._processes:
            with held():
                self._processes.popitem()[1].close()

    def _ask(self, requests: dict[int, bytes], seconds: float, prompts: Sequence[Any]) -> dict[int, Any]:
        """Return the answers of processes by their numbers."""
        processes = {self._processes[number]: number for number in requests}
        answers = exchange({process: requests[number] for process, number in processes.items()}, seconds)
        contents: dict[int, Any] = {}
        failures = []
        for process, number in processes.items():
            answer = answers[process]
            self._show(number, answer)
            if answer.ended:
                failures.append(self._ended(number, answer, seconds, prompts))
                continue
            contents[number] = json.loads(bytes(answer.data))
            if "failure" in contents[number]:
                failures.append(self._refused(number, contents[number], prompts))
        if failures:
            raise failures[0]
        return contents

    def _show(self, number: int, answer: Answer) -> None:
        """Show the first lines that a function prints."""
        lines = answer.output.decode("utf-8", "replace").strip().splitlines()
        if lines and number not in self._told:
            self._told.add(number)
            rest = f", and {len(lines) - 1} more lines" if len(lines) > 1 else ""
            self._tell(
                f"note: reward {self._rewards[number].name} printed {_quoted(lines[0])}{rest}; "
                "its later output is not shown"
            )

    def _ended(self, number: int, answer: Answer, seconds: float, prompts: Sequence[Any]) -> UserError:
        """Close a process without a whole answer; return why it has none."""
        with held():
            status = self._processes.pop(number).close(answer.ended == "died")
        what = f"reward {self._rewards[number].name}"
        doing = "imported its function"
        if prompts:
            first = _quoted(_text_of(prompts[0]))
            doing = f"scored {len(prompts)} completions, the first of the prompt {first}"
        last = answer.output.decode("utf-8", "replace").strip().splitlines()[-1:]
        printed = f"; it last printed {_quoted(last[0])}" if last else ""
        if answer.ended == "late":
            return UserError(
                f"{what} did not finish in {seconds:g} s while it {doing}{printed}",
                "look for an endless loop or a slow regular expression in it, or raise its time limit",
            )
        if answer.ended == "long":
            return UserError(f"{what} wrote to its process's pipe", "let it write only to files, or print")
        if status < 0:
            name = signal.Signals(-status).name
            return UserError(
                f"{what} was killed by {name} while it {doing}{printed}",
                f"if memory ran out (its limit is {_mebibytes(self._memory)}), let it use less or raise the "
                "limit; otherwise a library that it calls has a fault",
            )
        return UserError(
            f"{what} ended its process with exit status {status} while it {doing}{printed}",
            "let the function return instead of calling os._exit",
        )

    def _refused(self, number: int, content: dict[str, Any], prompts: Sequence[Any]) -> UserError:
        """Return the error for an answer that is not scores."""
        what = f"reward {self._rewards[number].name}"
        message, row = content["failure"], content.get("row")
        if content.get("search"):
            row = self._searched(number)
        if row is not None:
            message += f", for a completion of the prompt {_quoted(_text_of(prompts[row]))}"
        elif content.get("search"):
            message += (
                f", for {len(prompts)} completions, the first of the prompt {_quoted(_text_of(prompts[0]))}"
            )
        help = content["help"]
        if content.get("memory"):
            help = f"its limit is {_mebibytes(self._memory)}: {help}"
        return UserError(f"{what} {message}", help)

    def _searched(self, number: int) -> int | None:
        """Return the first completion for which a function raises an exception, if it is called for each."""
        process = self._processes[number]
        (answer,) = exchange({process: pickle.dumps(None)}, SEARCH_SECONDS).values()
        if answer.ended:
            with held():
                self._processes.pop(number).close()
            return None
        return json.loads(bytes(answer.data))["row"]


def _quoted(text: str) -> str:
    """Return a text in quotation marks on one line, cut to SHOWN_CHARACTERS."""
    line = " ".join(printable(text).split())
    if len(line) > SHOWN_CHARACTERS:
        line = f"{line[:SHOWN_CHARACTERS]}..."
    return f'"{line}"'


def _text_of(prompt: Any) -> str:
    """Return a prompt's text: of a conversation, its last message."""
    if isinstance(prompt, str):
        return prompt
    last = prompt[-1] if isinstance(prompt, list) and prompt else prompt
    return str(last.get("content", "")) if isinstance(last, dict) else str(last)


def _mebibytes(number: int) -> str:
    return f"{number / 2**20:,.0f} MiB"


# What runs in a function's process.


class _Refused(Exception):
    """A failure of the function, with the fields of its answer."""

    def __init__(self, failure: str, help: str, **more: Any) -> None:
        super().__init__(failure)
        self.answer = {"failure": failure, "help": help, **more}


def main() -> None:
    """Serve until stdin ends."""
    supervise(int(sys.argv[3]))
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # The function may read and print.
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    function: Callable[..., Any] | None = None
    arguments: dict[str, list[Any]] = {}
    with suppress(EOFError, BrokenPipeError):
        while True:
            request = read_request(requests)
            try:
                if function is None:
                    reward, memory = request
                    limit_memory(memory, resource.RLIMIT_DATA)
                    function = _function(reward)
                    answer: dict[str, Any] = {}
                elif request is None:
                    answer = {"row": _first_failing(function, arguments)}
                else:
                    arguments = request
                    answer = {"scores": _scores(function, arguments)}
            except _Refused as refused:
                answer = refused.answer
            except UserError as error:
                answer = {"failure": f"stopped: {error.message}", "help": error.help}
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            answers.write(json.dumps(answer).encode() + b"\n")
            answers.flush()


def _function(reward: Reward) -> Callable[..., Any]:
    if reward.file is None:
        if reward.function not in READY_REWARDS:
            close = difflib.get_close_matches(reward.function, READY_REWARDS)
            raise _Refused(
                "is not a ready reward, and names no file",
                f"did you mean {close[0]}?" if close else f"ready rewards: {', '.join(READY_REWARDS)}",
            )
        return ready_reward(reward.function, reward.column, reward.options)
    path = Path(reward.file).absolute()
    sys.path.insert(0, str(path.parent))
    # Not under the file's own name, which may be that of a module of the standard library.
    name = f"reward_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise _Refused(f"is in {path.name}, which is not a Python file", "let its name end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        missing = isinstance(error, ImportError) and error.name
        raise _Refused(
            f"cannot be imported: {_description(error, path)}",
            f"install {error.name} in the environment of the run"  # type: ignore[attr-defined]
            if missing
            else f"correct the file; python {path.name} shows the error",
        ) from error
    function = getattr(module, reward.function, None)
    if function is None:
        names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        close = difflib.get_close_matches(reward.function, names)
        raise _Refused(
            f"does not exist: {path.name} has no function {reward.function}",
            f"did you mean {close[0]}?" if close else f"its functions: {', '.join(names) or 'none'}",
        )
    if not callable(function):
        raise _Refused(f"is not a function, but {_a(function)}", "name a function of the file")
    return function


def _description(error: BaseException, path: Path | None = None) -> str:
    """Return an exception's type and first line, and the last place in the function's own file."""
    text = f"{type(error).__name__}: {first_line(error)}" if str(error).strip() else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    file_frames = [frame for frame in frames if path is not None and frame.filename == str(path)]
    return f"{text} ({path.name}:{file_frames[-1].lineno})" if file_frames and path is not None else text


def _scores(function: Callable[..., Any], arguments: dict[str, list[Any]]) -> Scores:
    """Call a function for all completions.

    Raises:
        _Refused: it failed, or returned something else than scores.
    """
    name = getattr(function, "__name__", "function")
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise _Refused(
            f"cannot be called: {error}; its arguments are {', '.join(arguments)}",
            f"define it as def {name}(completions, **columns), and name the columns that it reads",
        ) from error
    except ValueError:
        pass  # a function of C without a signature
    try:
        values = _called(function, arguments)
    except MemoryError as error:
        raise _Refused(
            "ran out of memory", "let it use less memory, or raise the limit", memory=True
        ) from error
    except UserError:
        raise
    except BaseException as error:
        code = getattr(inspect.unwrap(function), "__code__", None)
        raise _Refused(
            f"raised {_description(error, Path(code.co_filename) if code else None)}",
            "correct the function, or let it return None for a completion that it cannot score",
            search=True,
        ) from error
    return _checked(values, len(arguments["completions"]))


def _called(function: Callable[..., Any], arguments: dict[str, list[Any]]) -> Any:
    values = function(**arguments)
    return asyncio.run(_awaited(values)) if inspect.isawaitable(values) else values


async def _awaited(values: Awaitable[Any]) -> Any:
    return await values


def _checked(values: Any, count: int) -> Scores:
    """Return what a function returned as numbers.

    Raises:
        _Refused: it is not a list of `count` finite numbers or None.
    """
    wanted = "return a list with one number for each completion, or None for one that is not scored"
    try:
        if isinstance(values, str | bytes | dict | set):
            raise TypeError
        values = list(values)
    except TypeError:
        raise _Refused(f"returned {_a(values)} instead of a list", wanted) from None
    if len(values) != count:
        raise _Refused(f"returned {len(values)} scores for {count} completions", wanted)
    scores: Scores = []
    for row, value in enumerate(values):
        if value is None:
            scores.append(None)
            continue
        # An array of one number is a mistake in its shape.
        if not hasattr(type(value), "__float__") or getattr(value, "ndim", None):
            raise _Refused(f"returned {_a(value)} instead of a number", wanted, row=row)
        try:
            number = float(value)
        except (OverflowError, TypeError, ValueError):
            number = math.inf
        if not math.isfinite(number):
            raise _Refused(
                f"returned {value!s:.20}, which is not a finite number",
                "return a finite number, or None for a completion that is not scored",
                row=row,
            )
        scores.append(number)
    return scores


def _a(value: Any) -> str:
    """Return a value with its type, such as "a str ('good')"."""
    try:
        text = repr(value)
    except Exception:
        text = "..."
    name = "None" if value is None else f"a value of type {type(value).__name__}"
    return name if value is None else f"{name} ({text[:50]}{'...' if len(text) > 50 else ''})"


def _first_failing(function: Callable[..., Any], arguments: dict[str, list[Any]]) -> int | None:
    """Return the first completion for which a function raises an exception, called for each alone."""
    for row in range(len(arguments["completions"])):
        try:
            _called(function, {name: values[row : row + 1] for name, values in arguments.items()})
        except BaseException:
            return row
    return None
