"""Compare the time model of `recipe plan` with published, measured steps.

    python -m scripts.step_times reduce OUT...  schedules of what was compiled: scripts/published_runs.py,
                                                tests/bench/published.py
    python -m scripts.step_times attention      fit attention kernels' times, to published timings
    python -m scripts.step_times fit            fit what devices reach, and the error of estimates
    python -m scripts.step_times write          the tables of docs/planning.md

`reduce` writes scripts/published/ROW.json: the reduction of a scheduled module, and the measured time.
`attention` writes compiler/data/kernels.json, `fit` compiler/data/rates.json. Each generation has three
numbers: the share of libtpu's cycles that products reach, the share that other operations reach, and the
share of the links' speed that collectives reach. With few rows, the fit pulls them toward 1.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import TypeAdapter

from recipec import ROOT
from recipec.compiler.lowering.hardware import Accelerator, from_text
from recipec.compiler.plan import rates
from recipec.compiler.plan.hlo.parse import parse
from recipec.compiler.plan.hlo.read_schedule import schedule
from recipec.compiler.plan.kernels import DATA, Attention, KernelSeconds, Splash
from recipec.compiler.plan.schedule import Schedule, priced
from recipec.compiler.plan.timeline import Reached, timeline
from recipec.compiler.plan.torus import Torus
from scripts.recipe_pages import table as markdown

FOLDER = Path(__file__).parent / "published"
TIMINGS = FOLDER / "attention.csv"
PAGE = ROOT / "docs" / "planning.md"
BEGIN, END = "<!-- published -->\n", "<!-- /published -->"
NAMES = ("products", "memory", "links")
"""The fitted numbers."""
FEW = 3
"""The number of rows that a generation needs for its own interval."""
PULL = 0.5
"""The weight of a share's distance from 1, relative to a row's error."""


@dataclass(frozen=True)
class Row:
    """A published step.

    Attributes:
        row: its name: chip, chips, model.
        run: its model and method, in words.
        generation: of the devices.
        seconds: the measured time.
        lora: whether adapters are trained; otherwise all weights are.
        source: where it was published.
        compiled: versions of jax and libtpu that compiled it, and differences from the published run.
        schedules: the schedules of its time with their weights: one, or two on a line over depth.
    """

    row: str
    run: str
    generation: str
    seconds: float
    lora: bool
    source: str
    compiled: str
    schedules: tuple[tuple[float, Schedule], ...]

    def predicted(self, reached: Reached) -> float:
        """Predict the seconds of the step by the model."""
        return sum(weight * timeline(schedule, reached).seconds for weight, schedule in self.schedules)


ROW: TypeAdapter[Row] = TypeAdapter(Row)


def reduced(out: Path) -> Row:
    """Build the row of a folder with scheduled modules and facts.json."""
    facts = json.loads((out / "facts.json").read_text(encoding="utf-8"))
    accelerator = from_text(facts["settings"]["compile_topology"])
    places = list(_places(facts["coordinates"]))
    torus = Torus.of(accelerator, places)
    axes = {name: size for name, size in facts["mesh"].items() if size > 1}
    files = sorted(out.glob("scheduled*.txt"), key=lambda path: _depth(path) or 0)
    dropped = f", without {len(facts['dropped'])} of its flags" if facts["dropped"] else ""
    versions = facts["versions"]
    return Row(
        facts["row"],
        facts["run"],
        accelerator.generation,
        facts["step_s"],
        facts.get("lora", False),
        facts["source"],
        f"{versions['jax']}, {versions['libtpu']}{dropped}",
        tuple(
            (weight, _schedule(path, accelerator, torus, axes))
            for weight, path in zip(_weights(files, facts), files, strict=True)
        ),
    )


def _schedule(path: Path, accelerator: Accelerator, torus: Torus, axes: dict[str, int]) -> Schedule:
    module = parse(path.read_text(encoding="utf-8"))
    published = rates.published(accelerator, KernelSeconds(accelerator).seconds)
    return priced(*schedule(module, published, axes, torus))


def _depth(path: Path) -> int | None:
    """Return the number of layers of a module that is one of several: scheduled-6.txt."""
    _, _, layers = path.stem.partition("-")
    return int(layers) if layers else None


def _weights(files: Sequence[Path], facts: dict[str, Any]) -> list[float]:
    """Return the weights of two depths, for the line through them at the model's depth."""
    if len(files) == 1:
        return [1.0]
    low, high = (float(_depth(path) or 0) for path in files)
    share = (facts["layers"] - low) / (high - low)
    return [1 - share, share]


def _places(coordinates: Iterable[Sequence[int]]) -> Iterable[tuple[int, ...]]:
    """Yield the coordinates of each device's chip followed by the device's number on the chip."""
    seen: dict[tuple[int, ...], int] = {}
    for place in map(tuple, coordinates):
        seen[place] = seen.get(place, -1) + 1
        yield (*place, seen[place])


def rows() -> list[Row]:
    """Read the rows that compile, ordered by name."""
    return [ROW.validate_json(path.read_bytes()) for path in sorted(FOLDER.glob("*.json"))]


def fitted(of: Sequence[Row]) -> Reached:
    """Fit what devices reach to these rows."""
    from scipy.optimize import least_squares

    def residuals(logs: Any) -> list[float]:
        reached = Reached(**{name: math.exp(-log) for name, log in zip(NAMES, logs, strict=True)})
        errors = [math.log(row.predicted(reached) / row.seconds) for row in of]
        return [*errors, *(PULL * log for log in logs)]

    best = least_squares(residuals, [0.1] * len(NAMES), bounds=(-0.7, 1.5))
    return Reached(**{name: round(math.exp(-log), 4) for name, log in zip(NAMES, best.x, strict=True)})


def left_out(every: Sequence[Row]) -> list[tuple[Row, float]]:
    """Predict each row from the other rows of its generation; if there are none, assume full speed."""
    out = []
    for row in every:
        others = [
            candidate
            for candidate in every
            if candidate is not row and candidate.generation == row.generation
        ]
        out.append((row, row.predicted(fitted(others) if others else Reached())))
    return out


def interval(errors: Sequence[float], what: str, within: Sequence[float] = ()) -> dict[str, Any]:
    """Return the interval that is assumed to hold four of five steps, as measured over predicted times. It is
    from Student's t of their logarithms, whose mean is assumed to be 0.

    Args:
        within: errors of the same kind of step, too few for their own interval. The interval holds them.
    """
    from scipy.stats import t

    logs = [math.log(error) for error in errors]
    spread = math.sqrt(sum(log * log for log in logs) / len(logs))
    far = max(spread * float(t.ppf(0.9, len(logs))), *(abs(math.log(error)) for error in within), 0.0)
    took = f"{min(errors):.2f} to {max(errors):.2f} times what this model says without it"
    basis = f"Of {len(errors)} published steps{what}, each took {took}."
    if within:
        basis += f" The one of LoRA took {within[0]:.2f} times."
    return {"low": round(math.exp(-far), 3), "high": round(math.exp(far), 3), "basis": basis}


def fit() -> None:
    """Write what devices reach, and the intervals."""
    every, data = rows(), json.loads(rates.DATA.read_text(encoding="utf-8"))
    ratios = [(row, row.seconds / seconds) for row, seconds in left_out(every)]
    generations = sorted({row.generation for row in every})
    of = {name: [ratio for row, ratio in ratios if row.generation == name] for name in generations}
    of_all, of_lora = [ratio for _, ratio in ratios], [ratio for row, ratio in ratios if row.lora]
    data["reached"] = {
        name: vars(fitted([row for row in every if row.generation == name])) for name in generations
    }
    data["intervals"] = {"all": interval(of_all, ""), "lora": interval(of_all, "", of_lora)} | {
        name: interval(errors, f" on {name}") for name, errors in of.items() if len(errors) >= FEW
    }
    rates.DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def attention() -> None:
    """Write the attention kernels' model with the smallest relative errors over the published timings."""
    from scipy.optimize import least_squares

    data = json.loads(DATA.read_text(encoding="utf-8"))
    for generation in sorted({name for name, _, _ in timings()}):
        of = [
            (kernel, seconds)
            for name, kernel, seconds in timings()
            if name == generation and kernel.phase == "fwd"
        ]
        peak = from_text(f"{generation}-8").peak_flops_per_device

        def residuals(logs: Any, of: Sequence[tuple[Splash, float]] = of, peak: float = peak) -> list[float]:
            row, more, block, pair = (math.exp(log) for log in logs)
            law = Attention((row, more), block, pair)
            return [math.log(law.seconds(kernel, peak) / seconds) for kernel, seconds in of]

        best = least_squares(residuals, [math.log(start) for start in (1e-9, 1e-9, 3e-7, 1.4e-12)])
        row, more, block, pair = (float(f"{math.exp(log):.3g}") for log in best.x)
        data["attention"][generation] = {"row": [row, more], "block": block, "pair": pair}
        off = math.sqrt(sum(error * error for error in best.fun) / len(of))
        print(f"{generation}: {len(of)} timings, off by {100 * off:.1f} % in the mean square")
    DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def timings() -> list[tuple[str, Splash, float]]:
    """Read generation, kernel and seconds of the published timings."""
    out = []
    with TIMINGS.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            length, q, kv = (int(row[name]) for name in ("length", "block_q", "block_kv"))
            visited = sum(-(-min((block + 1) * q, length) // kv) for block in range(-(-length // q)))
            kernel = Splash(row["pass"], int(row["rows"]), length, int(row["head_size"]), visited, q * kv)
            out.append((row["generation"], kernel, float(row["ms"]) / 1e3))
    return out


def table() -> str:
    """Return the rows as Markdown; each is predicted from the other rows."""
    cells: list[tuple[str, ...]] = []
    errors: list[float] = []
    for row, seconds in left_out(rows()):
        errors.append(seconds / row.seconds - 1)
        name = f"{row.row.partition('-')[0]}: {row.run} ({row.row})"
        figures = f"{row.seconds:.3f}", f"{seconds:.3f}", f"{100 * errors[-1]:+.1f} %"
        cells.append((name, row.compiled, *figures))
    worst, middle = max(map(abs, errors)), median(map(abs, errors))
    head = ("run", "jax, libtpu", "measured, s", "predicted without it, s", "error")
    return f"{markdown(head, cells)}\nMedian error {100 * middle:.1f} %, worst {100 * worst:.1f} %."


def main(argv: Sequence[str]) -> int:
    command, *rest = argv or ["write"]
    if command == "reduce":
        for out in map(Path, rest):
            row = reduced(out)
            (FOLDER / f"{row.row}.json").write_bytes(ROW.dump_json(row) + b"\n")
            print(f"{row.row}: {row.seconds} s measured, {row.predicted(Reached()):.3f} s at full speed")
    elif command == "fit":
        fit()
    elif command == "attention":
        attention()
    elif command != "write":
        print(__doc__, file=sys.stderr)
        return 2
    else:
        before, _, after = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}{table()}\n{END}{after.partition(END)[2]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
