"""Compare the last checkpoints of two runs, bit by bit.

python -m recipec.compiler.rehearse.same_parameters A B
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

ITEMS = ("model_params", "optimizer_state")
"""The items that Tunix saves at each step."""


def main(arguments: Sequence[str]) -> int:
    """Print one line about two folders of checkpoints; return 0 if their last steps are identical."""
    first, second = (Path(argument) for argument in arguments)
    steps = [max(int(p.name) for p in folder.iterdir() if p.name.isdigit()) for folder in (first, second)]
    if steps[0] != steps[1]:
        print(f"the last checkpoints are of different steps: {steps[0]} and {steps[1]}")
        return 1
    arrays = numbers = 0
    for item in ITEMS:
        left, right = (read_arrays(folder / str(steps[0]) / item) for folder in (first, second))
        if left.keys() != right.keys():
            print(f"{item}: different arrays: {', '.join(sorted(left.keys() ^ right.keys())[:3])}")
            return 1
        worst = max(left, key=lambda path: _difference(left[path], right[path]))
        if any(left[path].tobytes() != right[path].tobytes() for path in left):
            print(f"{item}: {worst} differs by up to {_difference(left[worst], right[worst]):.1e}")
            return 1
        arrays += len(left)
        numbers += sum(array.size for array in left.values())
    print(f"step {steps[0]}: {arrays} arrays of parameters and optimizer, {numbers:,} numbers, bit-identical")
    return 0


def read_arrays(directory: Path) -> dict[str, np.ndarray]:
    """Read every array of a saved tree, by its path, independent of the devices it was saved from."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    path = directory.resolve()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.metadata(path).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        restored = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    leaves = jax.tree_util.tree_flatten_with_path(restored)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}


def _difference(left: np.ndarray, right: np.ndarray) -> float:
    import numpy as np

    if left.shape != right.shape:
        return float("inf")
    if left.size == 0:
        return 0.0
    return float(np.max(np.abs(left.astype(np.float64) - right.astype(np.float64))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
