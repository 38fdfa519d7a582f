"""The flags that the installed libtpu accepts: compiler/data/libtpu.json.

    python -m scripts.libtpu_flags          writes the names
    python -m scripts.libtpu_flags --check  reports whether they have changed

Words in the library that could be names of flags are passed to it, as many at once as a variable can hold,
each with a value that is invalid for any number or switch. libtpu then reports the names it does not know.
"""

from __future__ import annotations

import json
import mmap
import re
import subprocess
import sys
import textwrap
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from recipec.compiler.lowering.libtpu import DATA
from recipec.compiler.plan.pool import environment

WORD = re.compile(rb"(?<![A-Za-z0-9_.])(?:xla|megascale|tpu)_[a-z0-9_]{3,90}(?![A-Za-z0-9_.])")
UNKNOWN = re.compile(r"Unknown command line flag '([^']+)'")
AT_ONCE = 1000
ASK = """
from jax.experimental import topologies
topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1")
"""


def words() -> list[str]:
    """Return words in the library that could be flags."""
    library = find_spec("libtpu")
    assert library is not None and library.origin is not None, "libtpu is not installed"
    with (Path(library.origin).parent / "libtpu.so").open("rb") as file:
        text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return sorted({match[0].decode() for match in WORD.finditer(text)})


def unknown(names: list[str]) -> set[str]:
    """Return the names that libtpu does not know as flags."""
    unknown_names: set[str] = set()
    for start in range(0, len(names), AT_ONCE):
        flags = " ".join(f"--{name}=no?" for name in names[start : start + AT_ONCE])
        ran = subprocess.run(
            [sys.executable, "-c", ASK],
            env={**environment(), "LIBTPU_INIT_ARGS": flags},
            capture_output=True,
            text=True,
            check=False,
        )
        unknown_names |= set(UNKNOWN.findall(ran.stdout + ran.stderr))
    return unknown_names


def main() -> int:
    data = json.loads(DATA.read_text(encoding="utf-8"))
    every = words()
    refused = unknown(every)
    names = [name for name in every if name not in refused]
    if "--check" in sys.argv:
        changed = sorted({*names} ^ {*data["names"]})
        print(f"libtpu {version('libtpu')}: {len(names)} flags; changed: {', '.join(changed) or 'none'}")
        return 1 if changed or not refused else 0
    rest = json.dumps({**data, "libtpu": version("libtpu"), "names": []}, indent=1)
    listed = textwrap.fill(json.dumps(names), 118, break_on_hyphens=False, subsequent_indent="  ")
    DATA.write_text(rest.replace('"names": []', f'"names": {listed}') + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
