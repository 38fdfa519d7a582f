"""Compare v6e-8 with the recipe: devices, numbers, time, a merge.

Made by recipec from the recipe qwen3-vl-8b-v6e8: edit recipe.yaml and build again.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for a copied runtime/

try:
    from runtime.probe.probe import main
except ModuleNotFoundError as error:
    sys.exit(f"{error}: pip install -r requirements-train.txt")

if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent))
