"""`make bench`: what the command costs, each figure beside a baseline measured in the same run.

Writes docs/benchmarks.md. The baseline of every command is the same interpreter importing the
libraries that the compiler stands on, since that part is theirs.
"""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = 15
LIBRARIES = ("pydantic", "jinja2", "ruamel.yaml", "typer", "rich")


def seconds(command: list[str]) -> list[float]:
    """Wall-clock seconds of each of RUNS runs, after one that warms the file cache."""
    out = []
    for run in range(RUNS + 1):
        start = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if run:
            out.append(time.perf_counter() - start)
    return out


def processor() -> str:
    """The processor's name as Linux gives it, else as Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> int:
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
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in LIBRARIES)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    text = f"""# Benchmarks

Written by `make bench`. Measured on {today}: {processor()}, {os.cpu_count()} cores, Python
{platform.python_version()}, recipec {metadata.version("recipec")}, {versions}.

## The command

Wall-clock seconds of the whole process, {RUNS} runs each. The ratio is the median against the
baseline's, measured in the same run.

| | min | median | max | ratio | target (median) |
|---|---|---|---|---|---|
{chr(10).join(rows)}
"""
    (ROOT / "docs").mkdir(exist_ok=True)
    (ROOT / "docs" / "benchmarks.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
