"""Import all modules of an installed runtime, and start an artifact's scripts, without this repository.

python alone.py SITE ARTIFACT        SITE: the folder that the wheel is installed in
"""

from __future__ import annotations

import runpy
import sys
from importlib import import_module
from pathlib import Path

SCRIPTS = ("train.py", "merge.py", "probe.py", "train_torchax.py", "baseline/train_trl.py")


def main(site: str, artifact: Path) -> None:
    checkout = Path(__file__).resolve().parents[2]
    sys.dont_write_bytecode = True
    sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
    outside = [path for path in sys.path if not Path(path or ".").resolve().is_relative_to(checkout)]
    packages = [path for path in sys.path if path.endswith("site-packages")]
    sys.path[:] = [site, *dict.fromkeys([*outside, *packages])]
    for script in SCRIPTS:
        sys.argv = [str(artifact / script), "--help"]
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as ended:
            assert not ended.code, (script, ended.code)
    for path in sorted(Path(site, "runtime").rglob("*.py")):
        name = ".".join(path.relative_to(site).with_suffix("").parts).removesuffix(".__init__")
        if not name.endswith("__main__"):
            module = import_module(name)
            assert module.__file__ == str(path), module
    present = {name.split(".")[0] for name in sys.modules}
    assert not present & {"recipec", "spec", "compiler", "port", "templates"}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
