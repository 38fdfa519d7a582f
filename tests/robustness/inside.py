"""`recipe` in this process, starting at its main(), with commands and bad files of every kind."""

from __future__ import annotations

import ctypes
import io
import os
import re
import resource
import signal
import socket
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

RECIPE = """\
recipe: 1
name: example
model: {id: google/gemma-3-270m-it}
mesh: {accelerator: v5e-8, axes: {fsdp: 8}}
lora: {rank: 8}
data: {train: [train.jsonl]}
train: {steps: 10}
"""

MEMORY = 2 << 30
"""The most bytes of memory for a command."""

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that could control a terminal."""


@dataclass(frozen=True)
class Done:
    """A command's exit status and output."""

    status: int
    out: str
    err: str

    def faults(self) -> list[str]:
        """Return what no command may do, for any input."""
        both = self.out + self.err
        return [
            *([f"exit status {self.status}"] if self.status not in (0, 1, 2) else []),
            *(
                word
                for word in ("Traceback (most", "E0000", "Exception ignored", "not enough memory")
                if word in both
            ),
            *(["fails without a word"] if self.status and not (self.err or self.out).strip() else []),
            *(["control characters"] if CONTROL.search(both) else []),
        ]


def recipe(*arguments: str, seconds: int = 300) -> Done:
    """Run a command line. After `seconds`, it ends with status -1."""
    from recipec.compiler.cli import main as cli

    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
    }
    signal.signal(signal.SIGALRM, _hanging)
    signal.alarm(seconds)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, limits[1]))  # an endless file ends there
    try:
        with mock.patch.multiple(
            sys, argv=["recipe", *arguments], stdin=io.StringIO(), stdout=out, stderr=err
        ):
            try:
                cli.main()
            except SystemExit as left:
                status = left.code if isinstance(left.code, int) else 1
            except _Hanging:
                status = -1
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Done(status, *(stream.buffer.getvalue().decode("utf-8", "replace") for stream in (out, err)))  # type: ignore[attr-defined]


class _Hanging(BaseException):
    """The time is over."""


def _hanging(*_: Any) -> NoReturn:
    raise _Hanging


@contextmanager
def without_privileges() -> Iterator[None]:
    """Drop the capabilities that let root access files against their permissions."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3 of the interface, this thread
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then their upper halves
    if libc.capget(header, sets):
        raise OSError(ctypes.get_errno(), "capget")
    effective = sets[0]
    sets[0] &= ~(1 << 1 | 1 << 2 | 1 << 3)  # DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER
    if libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset")
    try:
        yield
    finally:
        sets[0] = effective
        libc.capset(header, sets)


def fill(folder: Path) -> dict[str, str]:
    """Write a bad file of every kind into the working folder, and return their names by kind."""
    (folder / "good.yaml").write_text(RECIPE, encoding="utf-8")
    (folder / "train.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    (folder / "folder" / "inner").mkdir(parents=True)
    (folder / "binary").write_bytes(bytes(range(256)) * 40)
    (folder / "empty").write_bytes(b"")
    (folder / "unreadable").write_text(RECIPE)
    (folder / "unreadable").chmod(0)
    (folder / "locked").mkdir()
    (folder / "locked").chmod(0)
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as end:
        end.bind("socket")
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")
    _device(folder / "zero", 5)
    _device(folder / "full", 7)
    with (folder / "huge").open("wb") as file:
        file.truncate(5 << 30)
    wrong = RECIPE.replace("rank: 8", "rank: -8")
    (folder / "null").write_text(RECIPE.replace("example", "ex\0ample"))
    (folder / "utf16").write_text(RECIPE, encoding="utf-16")
    (folder / "new\nline").write_text(wrong)
    (folder / "esc\x1b[2J").write_text(wrong)
    (folder / "bidi\u202e").write_text(wrong)
    (folder / os.fsdecode(b"\xff\xfe")).write_text(wrong)
    (folder / "deep.json").write_text("[" * 3_000)
    (folder / "grün 🙂.yaml").write_text(wrong)
    return {
        **{kind: kind for kind in ("absent", "folder", "binary", "empty", "unreadable", "pipe", "socket")},
        **{kind: kind for kind in ("loop", "dangling", "zero", "full", "huge", "null", "utf16")},
        **{kind: kind for kind in ("new\nline", "esc\x1b[2J", "bidi\u202e", "deep.json", "grün 🙂.yaml")},
        "not UTF-8": os.fsdecode(b"\xff\xfe"),
        "in a locked folder": "locked/recipe.yaml",
        "below a file": "good.yaml/recipe.yaml",
        "long name": "n" * 300,
        "long path": "p/" * 3000,
        "nothing": "",
        "nobody's": "~nobodysuch/recipe.yaml",
        "web": "https://example.invalid/recipe.yaml",
    }


def _device(path: Path, minor: int) -> None:
    """Create a device such as /dev/zero for the test only, which a command may damage without harm.

    If the user can neither create nor damage one, link to the system's device.
    """
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, minor))
    except PermissionError:
        path.symlink_to(f"/dev/{path.name}")


READING: tuple[str, ...] = (
    *("build F -o out", "build good.yaml F -o out", "check F", "check F --format json", "explain F"),
    *("diff F good.yaml", "diff good.yaml F", "cost F --train-hours 1", "cost good.yaml --run F", "plan F"),
    *("parity F", "parity --compare F F", "port F", "port good.yaml F"),
    *("report F", "watch F --once", "rehearse F", "preview F", "preview good.yaml --model F"),
    *("preview good.yaml --data-dir F", "serve up F", "serve down F", "serve bench F"),
    *("serve verify F", "serve pin F"),
    *("pack F", "pack example --from F", "pack example --from built --recipe F"),
    *("check good.yaml --set extends=F", "check good.yaml --set model.id=F", "check good.yaml --set F"),
    *("check good.yaml --set data.train=[F]", "build good.yaml --check -o F", "explain good.yaml F"),
    *("new x --model google/gemma-3-270m-it --accelerator v5e-8 --data F -o made",),
    *(
        "new x --model F --accelerator v5e-8 -o made",
        "new F --model google/gemma-3-270m-it --accelerator v5e-8 -o made",
    ),
)
"""Command lines that read F, a bad file."""

WRITING: tuple[str, ...] = (
    *("build good.yaml -o F", "pack example --from built --recipe good.yaml -o F"),
    *("port config.yaml -o F", "port config.yaml --report F"),
    *("new x --model google/gemma-3-270m-it --accelerator v5e-8 -o F", "schema -o F"),
)
"""Command lines that should write F, but cannot."""

UNWRITABLE = (
    *("folder", "pipe", "socket", "loop", "in a locked folder", "below a file", "long name", "long path"),
)
"""Kinds that cannot be written with any content; no device, which a bug could replace."""


def words(line: str, name: str) -> Sequence[str]:
    """Return a command line's words, with the bad file's name in place of F."""
    return [re.sub(r"(?<=[=\[])F|^F$", lambda _: name, word) for word in line.split()]
