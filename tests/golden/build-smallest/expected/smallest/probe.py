"""Compare v5e-8 with the recipe: devices, numbers, time, a merge.

Made by recipec from the recipe smallest: edit recipe.yaml and build again.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # holds runtime/

from runtime.probe.probe import main

if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent))
