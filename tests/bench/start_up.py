"""Measure the parts of a generated train.py's start, up to the end of its first step, as shares of the time.

python -m tests.bench.start_up FILE train.py [ARGUMENT...]    runs a script, and writes its parts to FILE
"""

from __future__ import annotations

import builtins
import itertools
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
BEGAN = "RECIPEC_BENCH_BEGAN"
"""Environment variable: the time at which the process was started."""
PARTS = {
    "imports": "Python and imports",
    "devices": "devices and mesh",
    "data": "tokenizer and data",
    "weights": "weights: reading, casting, placing",
    "trainer": "model's and optimizer's objects",
    "tracing": "tracing and lowering",
    "compiling": "compiling, or reading what was compiled",
    "evaluating": "evaluating before step 1",
    "step": "executing the first step",
    "rest": "rest",
}
EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "tracing",
    "/jax/core/compile/backend_compile_duration": "compiling",
}
"""jax's own measurements."""
RUNS = (
    ("quickstart", (), "quickstart (tiny, 8 virtual devices)"),
    ("gemma3-270m-cpu", ("--model", str(ROOT / "build" / "gemma-3-270m")), "Gemma 3 270M (1 device)"),
)
"""Artifacts with their arguments."""


def section() -> str:
    """Return the start's part of docs/benchmarks.md."""
    columns: dict[str, dict[str, float]] = {}
    if not (ROOT / "build" / "gemma-3-270m").is_dir():
        subprocess.run([sys.executable, "-m", "scripts.gemma3_270m"], cwd=ROOT, check=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, arguments, title in RUNS:
            recipe = [str(Path(sys.executable).with_name("recipe")), "build", f"recipes/{name}.yaml", "-o"]
            subprocess.run([*recipe, str(folder)], cwd=ROOT, check=True, capture_output=True)
            data = ("--data-dir", str(ROOT / "recipes"))
            if name == "quickstart":
                from recipec.compiler.rehearse.quickstart import compiled, write_model

                write_model(folder / "model", compiled())
                arguments = ("--model", str(folder / "model"))
            for cache in ("cold", "warm"):
                columns[f"{title}, {cache} cache"] = start(folder / name, folder, (*arguments, *data))
                shutil.rmtree(folder / "out" / "checkpoints", ignore_errors=True)
            shutil.rmtree(folder / "out", ignore_errors=True)
    rows = []
    for part, words in PARTS.items():
        shares = (found.get(part, 0.0) / sum(found.values()) for found in columns.values())
        rows.append(f"| {words} | {' | '.join(f'{100 * share:.0f} %' for share in shares)} |")
    totals = " | ".join(f"{sum(found.values()):.1f}" for found in columns.values())
    return f"""A generated train.py from its process's start to the end of its first step, on this CPU. Each moment counts
for the innermost part that it belongs to. With a cold cache of compiled programs and tokenized data, and with what
that run left. Gemma 3 270M has its real weights, 536 MB in bfloat16. The machine's load average was {os.getloadavg()[2]:.0f}.

| | {" | ".join(columns)} |
|---|{"---|" * len(columns)}
{chr(10).join(rows)}
| seconds | {totals} |
"""


def start(artifact: Path, folder: Path, arguments: tuple[str, ...]) -> dict[str, float]:
    """Return the seconds of each of PARTS of one start."""
    result = folder / "parts.json"
    command = [sys.executable, "-m", "tests.bench.start_up", str(result), str(artifact / "train.py")]
    subprocess.run(
        [*command, "--steps", "1", "--output", str(folder / "out"), *arguments],
        cwd=ROOT,
        env=os.environ | {BEGAN: str(time.time())},
        check=True,
        capture_output=True,
    )
    found: dict[str, float] = json.loads(result.read_text())
    return found


class _Clock:
    """Spans of time by their purpose, which may be nested."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float, str]] = []
        self.end: float | None = None
        self._importing = False

    def around(self, holder: Any, name: str, part: str, last: bool = False) -> None:
        """Record the calls of a function. `last` ends the measurement when its result has been computed."""
        original = getattr(holder, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.time()
            try:
                made = original(*args, **kwargs)
                if last and self.end is None:
                    import jax

                    jax.block_until_ready(made.losses)
                return made
            finally:
                self.spans.append((began, time.time(), part))
                if last and self.end is None:
                    self.end = time.time()

        setattr(holder, name, timed)

    def imports(self) -> None:
        original: Callable[..., Any] = builtins.__import__

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._importing:
                return original(*args, **kwargs)
            self._importing, began = True, time.time()
            try:
                return original(*args, **kwargs)
            finally:
                self._importing = False
                if time.time() - began > 1e-3:
                    self.spans.append((began, time.time(), "imports"))

        builtins.__import__ = timed

    def event(self, name: str, seconds: float, **_: Any) -> None:
        if name in EVENTS:
            now = time.time()
            self.spans.append((now - seconds, now, EVENTS[name]))

    def parts(self, began: float) -> dict[str, float]:
        """Assign each moment from `began` to the end to the innermost span around it."""
        end = self.end or time.time()
        spans = [(began, end, "rest"), *((a, min(b, end), part) for a, b, part in self.spans if a < end)]
        cuts = sorted({moment for a, b, _ in spans for moment in (max(a, began), b)})
        out: dict[str, float] = defaultdict(float)
        for a, b in itertools.pairwise(cuts):
            around = [span for span in spans if span[0] <= a and b <= span[1]]
            out[max(around)[2]] += b - a
        return out


def main(result: str, script: str, *arguments: str) -> None:
    clock = _Clock()
    clock.imports()
    sys.path.insert(0, str(ROOT))
    import jax

    from recipec.runtime.training.evaluation import Evaluating
    from runtime.data import prepare, tokenizer
    from runtime.model import loading, sharding
    from runtime.training.trainer import Trainer

    began = float(os.environ[BEGAN])
    clock.spans.append((began, time.time(), "imports"))
    jax.monitoring.register_event_duration_secs_listener(clock.event)
    clock.around(sharding, "start_mesh", "devices")
    clock.around(tokenizer, "load_tokenizer", "data")
    clock.around(prepare, "prepare", "data")
    clock.around(loading, "build", "weights")
    clock.around(loading, "abstract_model", "trainer")
    clock.around(Trainer, "__init__", "trainer")
    clock.around(Evaluating, "run", "evaluating")
    clock.around(Trainer, "_step", "step", last=True)
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        Path(result).write_text(json.dumps(clock.parts(began)))


if __name__ == "__main__":
    main(*sys.argv[1:])
