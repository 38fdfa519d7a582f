"""Print a script of this folder, after what it shares with others: bash runs it from a wheel too.

python3 -m runtime.launch NAME       NAME: host, tpu-vm or xpk
"""

import sys
from importlib.resources import files

SHARED = {"tpu-vm": ("owner",), "xpk": ("owner",)}


def main(name: str) -> None:
    """Print a script."""
    for part in (*SHARED.get(name, ()), name):
        print(files(__package__).joinpath(f"{part}.sh").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(sys.argv[1])
