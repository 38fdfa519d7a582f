"""The package that an artifact's scripts run on; missing packages end a script with a sentence."""

import sys
from pathlib import Path
from types import TracebackType


def _explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Explain how to install a missing package of the script's requirements; else show Python's error."""
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    names = (f"requirements-{script.stem.removeprefix('train_')}.txt", "requirements-train.txt")
    wanted = next((name for name in names if (script.parent / name).is_file()), None)
    missing = isinstance(error, ModuleNotFoundError) and not (error.name or "runtime").startswith("runtime")
    if wanted and missing:
        print(f"{error}: pip install -r {script.parent / wanted}", file=sys.stderr)
    else:
        _shown(kind, error, trace)


_shown = sys.excepthook
sys.excepthook = _explain
