"""Import all modules of artifacts and start their scripts, without this repository on the path.

python alone.py FOLDER...        each a folder of one artifact, with its runtime/
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from importlib import import_module
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

OURS = ("spec", "compiler", "port", "templates", "runtime")


def forget() -> None:
    """Remove the previous artifact's packages from the process."""
    for name in [*sys.modules]:
        if name.split(".")[0] in OURS:
            del sys.modules[name]


def compile_once() -> None:
    """Compile each module once, because the artifacts' copies of it are equal."""
    compiled: dict[bytes, Any] = {}
    compiling = SourceFileLoader.source_to_code

    def once(self: SourceFileLoader, data: bytes, path: str, **options: Any) -> Any:
        if data not in compiled:
            compiled[data] = compiling(self, data, path, **options)
        return compiled[data]

    sys.dont_write_bytecode = True
    SourceFileLoader.source_to_code = once  # type: ignore[assignment, method-assign]


def main(folders: list[str]) -> None:
    compile_once()
    checkout = Path(__file__).resolve().parents[2]
    sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
    outside = [path for path in sys.path if not Path(path or ".").resolve().is_relative_to(checkout)]
    packages = [path for path in sys.path if path.endswith("site-packages")]
    for folder in folders:
        forget()
        sys.path[:] = [*dict.fromkeys([*outside, *packages])]
        lock = next(Path(folder).glob("*/recipe.lock.json"))
        artifact = lock.parent
        for script in ("train.py", "merge.py", "probe.py", "train_torchax.py", "baseline/train_trl.py"):
            if (artifact / script).is_file():
                sys.argv = [str(artifact / script), "--help"]
                try:
                    runpy.run_path(sys.argv[0], run_name="__main__")
                except SystemExit as ended:
                    assert not ended.code, (script, ended.code)
        for path in json.loads(lock.read_bytes())["runtime"]:
            if path.endswith(".py"):
                name = "runtime." + path.removesuffix(".py").replace("/", ".")
                module = import_module(name.removesuffix(".__init__"))
                assert str(module.__file__) == os.path.join(folder, "runtime", path), module
        present = {name.split(".")[0] for name in sys.modules}
        assert not present & {"recipec", "spec", "compiler", "port", "templates"}, artifact
        print(f"alone: {artifact.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
