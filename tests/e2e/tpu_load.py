"""Load merged folders into tpu-inference's own worker on 8 virtual CPU devices, and save its arrays.

test_tpu_inference_load.py runs this script with the Python of the serving environment, so that it imports
nothing from this project. Standard input is a list of [folder, file]. For each entry, the script writes the
worker's weights to the file, and a line of JSON to standard output: {"shards": {weight: shape on a device}},
or {"refusal": why it is not loaded}.

A server's process does the same up to here: vLLM's configuration, checked by its TPU platform, the worker,
its devices and mesh, the model of the checkpoint's architecture, and the loader that maps names and layouts.
The script replaces three things that need a TPU:

- the mesh: tpu-inference orders devices by their coordinates in the slice, which CPU devices lack;
- the chip's name, which its platform reads from the first device;
- the used and total HBM, which a CPU device does not report.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

DEVICES = 8

os.environ.update(
    JAX_PLATFORMS="cpu",
    XLA_FLAGS=f"--xla_force_host_platform_device_count={DEVICES}",
    TPU_SKIP_MDS_QUERY="1",
    SKIP_JAX_PRECOMPILE="1",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
)


def patch() -> None:
    import numpy as np
    from jax.sharding import Mesh
    from tpu_inference import utils
    from tpu_inference.platforms.tpu_platform import TpuPlatform
    from tpu_inference.runner import tpu_runner

    def mesh(shape: Any, names: Any, *, devices: Any) -> Mesh:
        return Mesh(np.array(devices).reshape(shape), names)

    tpu_runner.make_optimized_mesh = mesh
    TpuPlatform.get_device_name = classmethod(lambda cls, device_id=0: "TPU v6e")
    utils.hbm_usage_bytes = lambda devices: [(0, 32 * 2**30) for _ in devices]


def load(folder: str, file: str) -> dict[str, Any]:
    """Load a folder, save its weights to `file`, and return each weight's shape on a device."""
    import jax
    from safetensors.flax import save_file
    from tpu_inference.worker.tpu_worker import TPUWorker
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(
        model=folder,
        dtype="bfloat16",
        tensor_parallel_size=DEVICES,
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=512,
    ).create_engine_config()
    worker = TPUWorker(config, local_rank=0, rank=0, distributed_init_method="", is_driver_worker=True)
    worker.init_device()
    worker.load_model()
    weights = {
        ".".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path[:-1]): array
        for path, array in jax.tree_util.tree_leaves_with_path(worker.model_runner.state)
    }
    shards = {name: array.sharding.shard_shape(array.shape) for name, array in weights.items()}
    save_file(weights, file)
    return {"shards": shards}


def main() -> None:
    # vLLM logs to standard output, and so does Gloo from C++. Redirect both to standard error, so that
    # standard output holds only the results.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    jobs = json.loads(sys.stdin.read())
    patch()
    for folder, file in jobs:
        try:
            answer = load(folder, file)
        except Exception as error:  # any error of tpu-inference is a result
            answer = {"refusal": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
