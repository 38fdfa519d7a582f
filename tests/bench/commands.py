"""The cost of the command, compared with a baseline of the same run."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
RUNS = 15
LIBRARIES = ("pydantic", "jinja2", "ruamel.yaml", "typer", "rich")


def seconds(command: list[str]) -> list[float]:
    """Return the wall-clock seconds of RUNS runs, after one that warms the file cache.

    Modules are compiled once, as in an installed package, whatever this process's environment says.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    out = []
    for run in range(RUNS + 1):
        start = time.perf_counter()
        subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if run:
            out.append(time.perf_counter() - start)
    return out


def section() -> str:
    """Return the command's part of docs/benchmarks.md."""
    recipe = str(Path(sys.executable).with_name("recipe"))
    flagship = "recipes/gemma4-31b-v5p8.yaml"
    imports = "import " + ", ".join(LIBRARIES)
    with tempfile.TemporaryDirectory() as out:
        commands = {
            "the libraries alone (baseline)": ([sys.executable, "-c", imports], None),
            "`recipe --help`": ([recipe, "--help"], 0.3),
            "`recipe check` of the flagship": ([recipe, "check", flagship], None),
            "`recipe build` of the flagship": ([recipe, "build", flagship, "-o", out], 0.5),
        }
        measured = {name: seconds(command) for name, (command, _) in commands.items()}

    baseline = statistics.median(next(iter(measured.values())))
    rows = []
    for name, times in measured.items():
        median, limit = statistics.median(times), commands[name][1]
        verdict = "" if limit is None else f"{limit:.1f} s: {'met' if median <= limit else 'missed'}"
        figures = (min(times), median, max(times))
        cells = [name, *(f"{figure:.3f}" for figure in figures), f"{median / baseline:.2f}", verdict]
        rows.append(f"| {' | '.join(cells)} |")
    return f"""Wall-clock seconds of the whole process, {RUNS} runs each. The ratio is the median against the
baseline's, the same interpreter importing the libraries that the compiler uses, measured in the same run.

| | min | median | max | ratio | target (median) |
|---|---|---|---|---|---|
{chr(10).join(rows)}
"""
