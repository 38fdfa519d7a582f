"""Make the pictures of docs/reports.md: two runs of the quickstart, trained here, and a made-up sweep.

.venv/bin/python -m tests.report.images [--work build/report]

It trains the quickstart's small model on this machine's CPU for 200 steps, stops once and resumes, merges and
verifies, trains again with a tenth of the learning rate, writes the reports, and takes their pictures in
headless Chromium (Debian's, installed if it is missing). It skips runs that the folder already holds. The
sweep's figures are made up, and its pages say so.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from recipec.compiler.rehearse import quickstart
from tests.e2e.chromium import Tab, tab
from tests.report import writing

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
STEPS, STOP = 200, 120
RATES = {"fast": "1.0e-2", "slow": "1.0e-3"}
COLORS = 128
"""The colors of a picture's palette, few enough to keep its file small."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "report", help="where the runs lie")
    work = parser.parse_args().work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    for name in RATES:
        if not (work / name / "checkpoints" / "metrics.jsonl").is_file():
            train(work, name)
    sweeps = work / "sweeps"
    shutil.rmtree(sweeps, ignore_errors=True)
    for name, slower in (("bfloat16", 1.0), ("fp8", 0.75)):
        writing.sweep(sweeps / name, slower, "a stand-in: these figures are made up")
    pages = {
        "run": page(work, "run", "fast/checkpoints"),
        "compared": page(work, "compared", "fast/checkpoints", "--compare", "slow/checkpoints"),
        "sweep": page(work, "sweep", "sweeps/bfloat16", "--compare", "sweeps/fp8"),
    }
    pictures(pages)


def train(work: Path, name: str) -> None:
    """Train one of the runs. The first one is stopped, resumed, merged and verified."""
    if not (work / "model").is_dir():
        quickstart.write_model(work / "model", quickstart.compiled())
    artifacts = work / f"artifacts-{name}"
    sets = ["--set", f"train.steps={STEPS}", "--set", f"train.optimizer.learning_rate={RATES[name]}"]
    call("-m", "recipec.compiler.cli.main", "build", str(quickstart.RECIPE), "-o", str(artifacts), *sets)
    scripts = artifacts / "quickstart"
    places = ["--model", str(work / "model"), "--output", str(work / name)]
    data = ["--data-dir", str(quickstart.RECIPE.parent)]
    if name == "fast":
        call(str(scripts / "train.py"), *places, *data, "--steps", str(STOP))
        call(str(scripts / "train.py"), *places, *data, "--resume")
        call(str(scripts / "merge.py"), *places, "--verify")
    else:
        call(str(scripts / "train.py"), *places, *data)


def page(work: Path, name: str, *words: str) -> Path:
    file = work / f"{name}.html"
    call("-m", "recipec.compiler.cli.main", "report", *words, "-o", str(file), at=work)
    return file


def call(*words: str, at: Path = ROOT) -> None:
    subprocess.run([sys.executable, *words], check=True, cwd=at)


def pictures(pages: dict[str, Path]) -> None:
    """Take pictures of each page's start and of interesting parts, in a desktop's and a phone's window."""
    import tempfile

    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as profile, tab(Path(profile)) as browser:
        for file, name, width, scheme, first, last in (
            ("report-run.png", "run", 1440, "light", "header", "#plot-curves .subplot.x5y5"),
            ("report-compared.png", "compared", 1440, "light", "#compared", "#plot-curves .subplot.x3y3"),
            ("report-data.png", "run", 1440, "light", "#data", "#recipe"),
            ("report-sweep.png", "sweep", 1440, "light", "header", "#plot-tpot"),
        ):
            browser.show(pages[name], width, scheme)
            size = shoot(browser, IMAGES / file, width, first, last)
            print(f"{IMAGES / file}: {size / 1000:.0f} kB")


def shoot(browser: Tab, file: Path, width: int, first: str, last: str) -> int:
    """Save a picture of the page from one element to the end of another, and return its size in bytes."""
    from PIL import Image

    top, bottom = browser.evaluate(
        f"""[{first!r}, {last!r}].map((one, index) => {{
          const element = document.querySelector(one), part = element.closest("section") ?? element;
          const box = (index || !one.startsWith("#") ? element : part)
            .getBoundingClientRect();
          return Math.round(scrollY + (index ? box.bottom : box.top));
        }})"""
    )
    if last == "#recipe":
        bottom = (
            browser.evaluate("Math.round(document.querySelector('#recipe').getBoundingClientRect().top)") - 70
        )
    browser.screenshot(file)
    with Image.open(file) as picture:
        part = picture.convert("RGB").crop((0, max(0, top - 24), width, min(picture.height, bottom + 24)))
    part.quantize(COLORS, dither=Image.Dither.NONE).save(file, optimize=True)
    return file.stat().st_size


if __name__ == "__main__":
    main()
