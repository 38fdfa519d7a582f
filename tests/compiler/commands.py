"""The command line, in this process and in a new one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from recipec.compiler.cli import main as cli

RUNNER = CliRunner()


def recipe(*arguments: str | Path) -> tuple[int, str, str]:
    """Run the command in this process: exit status, stdout and stderr."""
    result = RUNNER.invoke(cli.app, [str(a) for a in arguments], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def command(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a new process."""
    return subprocess.run(
        [sys.executable, "-m", "recipec.compiler.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=60,
    )
