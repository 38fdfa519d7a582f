"""`data.transform`: a function of the user's own file, applied to each row before its format is read."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import UserError, first_line
from .values import kind


class Transform:
    """A function row -> row or None.

    It is called once for each row and reading, in the source's order. It gets the row as in the source (a
    dict of columns by the source's names; data.fields is applied afterwards) and may change it. It should
    depend on the row alone: every host calls it, and tokenized data is cached by content.

    Attributes:
        name: FILE.py:FUNCTION, for messages.
    """

    def __init__(self, name: str, path: Path, function: Callable[..., Any]) -> None:
        self.name = name
        self._path = path
        self._function = function

    @classmethod
    def load(cls, transform: str, folder: Path) -> Transform:
        """Load the function of "FILE.py:FUNCTION".

        Args:
            folder: the base of a relative FILE.

        Raises:
            UserError: there is no such file or function, or importing the file fails.
        """
        file, _, function = transform.rpartition(":")
        path = (folder / Path(file).expanduser()).absolute()
        name = f"{path.name}:{function}"
        if not file or not path.is_file():
            raise UserError(
                f"data.transform names {transform!r}, but there is no file {path}",
                "write FILE.py:FUNCTION, and put the file next to train.py",
            )
        module = _imported(path)
        found = getattr(module, function, None)
        if not callable(found):
            raise _no_function(module, path.name, function)
        return cls(name, path, found)

    def __call__(self, row: dict[str, Any], origin: str) -> dict[str, Any] | None:
        """Return a row's replacement; None to leave the row out.

        Raises:
            UserError: the function raises, or returns neither a row nor None.
        """
        try:
            made = self._function(row)
        except (Exception, SystemExit) as error:
            line = _line(error, self._path)
            raise UserError(
                f"{self._path.name}{f':{line}' if line else ''}: data.transform fails on {origin}: "
                f"{type(error).__name__}: {first_line(error)}",
                f"correct {self.name}; None leaves a row out",
            ) from error
        if made is None or isinstance(made, dict):
            return made
        raise UserError(
            f"{self.name} returns {kind(made)} for {origin}", "data.transform returns a row (a dict) or None"
        )


def _imported(path: Path) -> ModuleType:
    """Import the file as a module with a private name. No bytecode is written or read."""
    name = f"_recipe_transform_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    loader = SourceFileLoader(name, str(path))
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses look up their module there
    try:
        exec(loader.source_to_code(loader.get_data(str(path)), str(path)), module.__dict__)
    except SyntaxError as error:
        raise UserError(
            f"{path.name}:{error.lineno or 1} is not Python: {error.msg}", f"correct {path}"
        ) from error
    except (Exception, SystemExit) as error:
        line = _line(error, path)
        missing = isinstance(error, ImportError)
        raise UserError(
            f"{path.name}{f':{line}' if line else ''}: the file of data.transform cannot be imported: "
            f"{type(error).__name__}: {first_line(error)}",
            "the file must not need other files: install the packages that it imports, and move the code of "
            "other modules into it"
            if missing
            else f"correct {path}",
        ) from error
    return module


def _no_function(module: ModuleType, file: str, function: str) -> UserError:
    here = [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    close = get_close_matches(function, here, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    return UserError(
        f"{file} has no function {function!r}", f"{hint}it has {', '.join(here) or 'no functions'}"
    )


def _line(error: BaseException, path: Path) -> int | None:
    """Return the last line of the user's file that an exception passed through."""
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
