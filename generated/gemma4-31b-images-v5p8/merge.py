"""Merge the adapters that train.py makes into google/gemma-4-31B-it.

Made by recipec from the recipe gemma4-31b-images-v5p8: edit recipe.yaml and build
again.
Rank, alpha and the adapters' layout come from the checkpoint's own record.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for a copied runtime/

try:
    from runtime.merging.merge import main
    from runtime.settings import ModelSettings
except ModuleNotFoundError as error:
    sys.exit(f"{error}: pip install -r requirements-train.txt")

ARTIFACT = Path(__file__).resolve().parent

MODEL = ModelSettings(id="google/gemma-4-31B-it", family="gemma4")
CHECKPOINT = "checkpoints"
OUTPUT = "merged"
DTYPE = "bfloat16"
MAX_SHARD_SIZE = "5GB"
ADAPTER = True

if __name__ == "__main__":
    sys.exit(
        main(
            ARTIFACT,
            model=MODEL,
            checkpoint=CHECKPOINT,
            output=OUTPUT,
            dtype=DTYPE,
            max_shard_size=MAX_SHARD_SIZE,
            adapter=ADAPTER,
        )
    )
