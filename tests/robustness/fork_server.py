"""Run `recipe` many times under odd conditions, each time in a process that is forked from this one.

A forked process has everything that a real one has: streams, a working folder, limits and an exit status. It
starts a hundred times faster, because everything is already imported. Requests are JSON lines on stdin, and
answers are JSON lines on stdout. This process has no threads, so that it can fork safely.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import io
import json
import os
import pty
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import Any, NoReturn

from inside import RECIPE, without_privileges

SECONDS = 120.0
"""The time after which a process counts as hanging, far more than any of them takes."""


def serve() -> None:
    """Answer requests until stdin ends."""
    _warm_up()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        answer = run(json.loads(line))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Return a process's exit status, stdout and stderr; the status is -9 if it did not end by itself."""
    folder = Path(tempfile.mkdtemp())  # no context manager, whose end the child would also run
    files = {name: folder / name for name in ("stdout", "stderr")}
    master = slave = -1
    if "terminal" in asked:
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, asked["terminal"], 0, 0))
    child = os.fork()
    if child == 0:
        _become(asked, files, slave)
    if slave >= 0:
        os.close(slave)
    status, shown = _wait(child, master)
    out, err = (
        file.read_bytes().decode("utf-8", "surrogateescape") if file.exists() else ""
        for file in files.values()
    )
    shutil.rmtree(folder)
    return {"status": status, "out": shown or out, "err": err}


def _wait(child: int, master: int) -> tuple[int, str]:
    """Return the exit status, and the terminal's content."""
    shown = b""
    end = time.monotonic() + SECONDS
    while True:
        if master >= 0 and select.select([master], [], [], 0)[0]:
            try:
                shown += os.read(master, 65536)
                continue
            except OSError:  # the terminal's other end is closed
                os.close(master)
                master = -1
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            if master >= 0:
                while select.select([master], [], [], 0)[0]:
                    try:
                        shown += os.read(master, 65536)
                    except OSError:
                        break
                os.close(master)
            return os.waitstatus_to_exitcode(status), shown.decode("utf-8", "surrogateescape")
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -9, shown.decode("utf-8", "surrogateescape")
        time.sleep(0.002)


def _become(asked: dict[str, Any], files: dict[str, Path], slave: int) -> NoReturn:
    """Turn this process into the requested one, and exit as `recipe` does."""
    os.setsid()
    if slave >= 0:
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    _stdin(asked.get("stdin", "null"), slave)
    for number, name in ((1, "stdout"), (2, "stderr")):
        _output(number, asked.get(name, "kept"), files[name], slave)
    os.chdir(asked["cwd"])
    for name, value in asked.get("environment", {}).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    tempfile.tempdir = None
    if asked.get("deleted"):
        shutil.rmtree(asked["cwd"])
    if asked.get("unprivileged"):
        dropped = without_privileges()
        dropped.__enter__()  # permanently
    if "largest_file" in asked:
        resource.setrlimit(resource.RLIMIT_FSIZE, (asked["largest_file"], resource.RLIM_INFINITY))
    _streams(asked.get("encoding", "utf-8"))
    sys.argv = ["recipe", *asked["arguments"]]
    from recipec.compiler.cli import main as cli

    try:
        cli.main()
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 1
    _end(status)


def _end(status: int) -> NoReturn:
    """End this process as Python does, but without unloading the imports, which takes longest."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = 120
    os._exit(status)


def _stdin(kind: str, slave: int) -> None:
    if kind == "closed":
        os.close(0)
    else:
        source = slave if slave >= 0 else os.open(os.devnull, os.O_RDONLY)
        os.dup2(source, 0)


def _output(number: int, kind: str, file: Path, slave: int) -> None:
    if kind == "closed":
        os.close(number)
        return
    if kind == "unread":
        reading, target = os.pipe()
        os.close(reading)
    elif kind == "full":
        target = os.open("/dev/full", os.O_WRONLY)
    elif slave >= 0:
        target = slave
    else:
        target = os.open(file, os.O_WRONLY | os.O_CREAT)
    os.dup2(target, number)


def _streams(encoding: str) -> None:
    """Create sys.stdin, stdout and stderr as Python does when it starts."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            setattr(sys, name, None)
            continue
        if number == 0:
            sys.stdin = open(0, encoding=encoding, closefd=False)  # noqa: SIM115
            continue
        raw = open(number, "wb", closefd=False, buffering=-1)  # noqa: SIM115
        errors = "strict" if number == 1 else "backslashreplace"
        line = number == 2 or os.isatty(number)
        setattr(sys, name, io.TextIOWrapper(raw, encoding, errors, line_buffering=line))
        setattr(sys, f"__{name}__", getattr(sys, name))


def _warm_up() -> None:
    """Import what most commands import, and fill their caches."""
    from recipec.compiler.emitters.emit import emit
    from recipec.compiler.explain.diff import diff
    from recipec.compiler.explain.explain import explain
    from recipec.compiler.lowering.lower import lower
    from recipec.compiler.port import port as _port
    from recipec.spec.load import load

    loaded = load(Path("recipe.yaml"), (), RECIPE)
    program = lower(loaded).program
    assert program is not None and _port
    emit(program)
    explain(program, loaded, None)
    diff(program, program)
    gc.freeze()


if __name__ == "__main__":
    serve()
