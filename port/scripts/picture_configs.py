"""How many public configs with pictures `recipe port` carries over, as docs/images.md has it.

    python -m recipec.port.scripts.picture_configs AXOLOTL LLAMA-FACTORY UNSLOTH

The arguments are checkouts of the tools, the last one of Unsloth's notebooks. A config counts if its examples
train on pictures with given answers: preferences and rewards do not count. It is carried if `recipe port`
writes a whole recipe of it; the machine is the first of coverage.MACHINES that it fits. Of each other one,
the script prints the errors.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from recipec.compiler.lowering.hardware import from_name
from recipec.port.mesh import E1111
from recipec.port.port import Asked, Ported, port
from recipec.port.scripts.coverage import MACHINES, share

GCS = ("output_dir=gs://bucket/run",)
"""The folder of a run on several hosts, which all hosts can reach."""


def axolotl(checkout: Path) -> Iterator[list[Path]]:
    """Yield the examples with a processor."""
    for path in sorted(path for end in ("yaml", "yml") for path in checkout.glob(f"examples/**/*.{end}")):
        if re.search("^processor_type:", path.read_text(), re.MULTILINE):
            yield [path]


def llamafactory(checkout: Path) -> Iterator[list[Path]]:
    """Yield the examples that train on data with pictures, or limit their pixels."""
    for path in sorted(checkout.glob("examples/**/*.yaml")):
        text = path.read_text()
        if not re.search("image_max_pixels|mllm_|multimodal", text) or "stage: dpo" in text:
            continue
        described = re.search(r"^train_dataset: (\S+\.yaml)", text, re.MULTILINE)
        if described or "do_train: true" in text:
            yield [path, checkout / (described[1] if described else "data/dataset_info.json")]


def unsloth(checkout: Path) -> Iterator[list[Path]]:
    """Yield the notebooks on pictures, without their copies for other machines and those with rewards."""
    for path in sorted(checkout.glob("nb/*.ipynb")):
        copy = path.name.startswith(("Kaggle-", "AMD-", "HuggingFace Course-"))
        if re.search("Vision|OCR|Multimodal", path.name) and "GRPO" not in path.name and not copy:
            yield [path]


TOOLS: dict[str, Callable[[Path], Iterator[list[Path]]]] = {
    "Axolotl": axolotl,
    "LLaMA-Factory": llamafactory,
    "Unsloth's notebooks": unsloth,
}


def ported(files: list[Path], place: Path) -> Ported:
    """Port a config for the first machine that it fits."""
    for machine in MACHINES:
        sets = GCS if machine != MACHINES[0] else ()
        out = port(files, Asked(from_name(machine), place=place / "recipe.yaml", sets=sets, writes=False))
        if not any(problem.code == E1111 for problem in out.diagnostics):
            break
    return out


def main() -> None:
    lines = ["| Tool | Configs | Whole recipes |", "|---|---|---|"]
    every = carried = 0
    for (tool, select), checkout in zip(TOOLS.items(), map(Path, sys.argv[1:]), strict=True):
        count = whole = 0
        for files in select(checkout):
            with TemporaryDirectory() as place:
                out = ported(files, Path(place))
            count, whole = count + 1, whole + out.whole
            if not out.whole:
                print(f"{tool}: {files[0].relative_to(checkout)}")
                for problem in out.diagnostics:
                    if problem.severity == "error":
                        print(f"    {problem.code}: {problem.message}")
        lines.append(f"| {tool} | {count} | {whole} ({share(whole, count)}) |")
        every, carried = every + count, carried + whole
    print("\n".join([*lines, f"| all | {every} | {carried} ({share(carried, every)}) |"]))


if __name__ == "__main__":
    main()
