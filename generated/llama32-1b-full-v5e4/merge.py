"""Write the weights that train.py makes in the format of meta-llama/Llama-3.2-1B-Instruct.

Made by recipec from the recipe llama32-1b-full-v5e4: edit recipe.yaml and build again.
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

MODEL = ModelSettings(id="meta-llama/Llama-3.2-1B-Instruct", family="llama")
CHECKPOINT = "gs://my-bucket/llama32-1b-full"
OUTPUT = "merged"
DTYPE = "bfloat16"
MAX_SHARD_SIZE = "5GB"

if __name__ == "__main__":
    sys.exit(
        main(
            ARTIFACT,
            model=MODEL,
            checkpoint=CHECKPOINT,
            output=OUTPUT,
            dtype=DTYPE,
            max_shard_size=MAX_SHARD_SIZE,
        )
    )
