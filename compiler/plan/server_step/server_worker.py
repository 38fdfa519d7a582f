"""Compile tpu-inference's serving step for a TPU that this machine does not have.

compile.py runs this file as a script, with the interpreter of the serving environment (environment.py). It
imports nothing of this project, which is not installed there. It reads a results.ServeJob as JSON from
standard input, and prints a results.ServeAnswer as one line of JSON to standard output. The line lacks the
fields that compile.py reads from the compiled programs. Their texts are files in the folder that is the
argument.

The model, its shardings, the attention kernels, the layout of the key/value cache and the compiler's options
are tpu-inference's own, except functions that ask for a TPU or for weights. `patch` replaces them.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TOO_LARGE = ("RESOURCE_EXHAUSTED", "Ran out of memory")
"""Text in the compiler's error for a program that does not fit."""

LEAST_SEQUENCES = 8
"""The fewest sequences that tpu-inference's runner has room for (MIN_NUM_SEQS)."""

KERNEL_BODY = re.compile(r'"body":"[^"]*"')
"""A kernel's own program inside an HLO text. It is most of the text, and it is not needed."""


def main() -> None:
    threading.Thread(target=_end_without, args=(os.getppid(),), daemon=True).start()
    # vLLM logs to standard output. Send its log to standard error, and only the answer to standard output.
    answer_to, sys.stdout = sys.stdout, sys.stderr
    answer = compile_job(json.loads(sys.stdin.read()), Path(sys.argv[1]))
    print(json.dumps(answer), file=answer_to, flush=True)


def _end_without(parent: int) -> None:
    """End this process when its parent process has ended for any reason."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def compile_job(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Compile a ServeJob, and return the answer. Both are plain values.

    Each program of the answer has the name of its text's file.
    """
    started = time.monotonic()
    mesh = mesh_of(job)
    patch(job)
    models = [ServingModel(job, layers, mesh, folder) for layers in job["layers"]]
    pages = job["pages"] or _most_pages(job, models)
    with ThreadPoolExecutor(2) as pool:
        # Compiling releases Python's lock, so that the next program is traced during a compile.
        compiling = [
            [pool.submit(_compiled, *model.step(bucket, pages)) for bucket in job["buckets"]]
            for model in models
        ]
        head = pool.submit(_compiled, *models[0].head())
        depths = [
            {
                "layers": model.layers,
                "weights": model.weight_bytes,
                "page": model.page_bytes,
                "programs": [future.result() for future in futures],
            }
            for model, futures in zip(models, compiling, strict=True)
        ]
        return {
            "page_tokens": models[0].page_tokens,
            "pages": pages,
            "token_bytes": models[-1].token_bytes,
            "depths": depths,
            "head": head.result(),
            "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "seconds": time.monotonic() - started,
        }


def _most_pages(job: dict[str, Any], models: list[Any]) -> int:
    """Return the number of pages that vLLM would allocate in addition to the whole model's weights."""

    def whole(figures: list[float]) -> float:
        slope = (figures[-1] - figures[0]) / max(1, models[-1].layers - models[0].layers)
        return figures[0] + slope * (job["model_layers"] - models[0].layers)

    room = job["hbm_bytes"] * job["memory_share"] - whole([model.weight_bytes for model in models])
    # vLLM keeps one page for itself.
    return max(1, int(room // whole([model.page_bytes for model in models])) - 1)


def _compiled(lowered: Any, kind: str, tokens: int, file: Path, started: float) -> dict[str, Any]:
    """Compile a program, write its text to `file`, and return its figures.

    If the program does not fit the memory, return the compiler's message as `refusal`.
    """
    import jax

    program: dict[str, Any] = {"kind": kind, "tokens": tokens}
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if not any(sign in str(error) for sign in TOO_LARGE):
            raise
        return program | {"refusal": str(error), "seconds": time.monotonic() - started}
    memory = compiled.memory_analysis()
    file.write_text(KERNEL_BODY.sub('"body":""', compiled.as_text()))
    return program | {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "text": file.name,
        "seconds": time.monotonic() - started,
    }


def mesh_of(job: dict[str, Any]) -> Any:
    """Return the mesh of one replica in tpu-inference's own device order, with axes data (1) and model."""
    from jax.experimental import topologies
    from tpu_inference.layers.common.sharding import MESH_AXIS_NAMES_2D
    from tpu_inference.utils import make_optimized_mesh

    devices = topologies.get_topology_desc(platform="tpu", topology_name=job["topology"]).devices
    size = job["tensor_parallel"]
    return make_optimized_mesh((1, size), MESH_AXIS_NAMES_2D, devices=devices[:size])


def patch(job: dict[str, Any]) -> None:
    """Replace functions of tpu-inference that ask for a TPU or for weights."""
    import jax
    from flax import nnx
    from tpu_inference.distributed.jax_parallel_state import init_pp_distributed_environment
    from tpu_inference.kernels.ragged_paged_attention.v3 import (
        kernel,
        tuned_block_sizes,
        tuned_block_sizes_hd64,
    )
    from tpu_inference.models.common import model_loader
    from tpu_inference.platforms.tpu_platform import TpuPlatform

    name, version = job["chip"], job["kernel_version"]
    # The original asks this machine's chips. tpu-inference chooses the fp8 type by this name.
    TpuPlatform.get_device_name = classmethod(lambda cls, device_id=0: name)
    for module in (kernel, tuned_block_sizes, tuned_block_sizes_hd64):
        # The original reads jax.devices()[0], a CPU here. Each module has imported the function by name.
        module.get_tpu_version = lambda: version
    # One stage of pipeline parallelism. In a server, the worker process sets this.
    init_pp_distributed_environment("", 0, 1, None, False)

    def abstract(model_class: Any, vllm_config: Any, rng: Any, mesh: Any, **_: Any) -> Any:
        # The original fills the model with real or random weights. Here, shapes are enough.
        with jax.set_mesh(mesh):
            return nnx.eval_shape(lambda: model_class(vllm_config, rng, mesh), graph_updates=False)

    model_loader._get_nnx_model = abstract
    # The original prepares the image encoder with the weights. No images are served here.
    model_loader.maybe_create_mm_encoder_jit_manager = lambda **_: None


class ServingModel:
    """tpu-inference's model with some of its layers, without weights.

    Attributes:
        layers: number of decoder layers.
        weight_bytes: bytes of the weights on a device.
        page_tokens, page_bytes: tokens of a page of the key/value cache, and its bytes on a device.
        token_bytes: as in results.ServeAnswer.
    """

    def __init__(self, job: dict[str, Any], layers: int, mesh: Any, folder: Path) -> None:
        import jax
        from flax import nnx
        from jax.sharding import NamedSharding, PartitionSpec
        from tpu_inference.models.common import model_loader

        self.layers = layers
        self._job, self._mesh, self._folder = job, mesh, folder
        self._config = _vllm_config(job, layers, folder)
        key = jax.random.key(0)
        with jax.set_mesh(mesh):
            self._interface = model_loader.get_flax_model(self._config, key, mesh)
        specs = jax.tree_util.tree_leaves(
            nnx.get_partition_spec(self._interface.state), is_leaf=lambda x: isinstance(x, PartitionSpec)
        )
        self._weights = tuple(
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
            for leaf, spec in zip(self._interface.state_leaves, specs, strict=True)
        )
        self.weight_bytes = sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in self._weights
        )
        self._cache_layout()

    def _cache_layout(self) -> None:
        """Get the cache layout of each layer from tpu-inference's own cache manager."""
        from tpu_inference.runner.kv_cache_manager import KVCacheManager
        from tpu_inference.utils import to_torch_dtype

        config, kind = self._config, self._config.cache_config.cache_dtype
        runner = SimpleNamespace(
            vllm_config=config,
            model_config=config.model_config,
            cache_config=config.cache_config,
            parallel_config=config.parallel_config,
            speculative_config=None,
            mesh=self._mesh,
            attention_backend=None,
            kv_cache_dtype=to_torch_dtype(config.model_config.dtype if kind == "auto" else kind),
        )
        manager = KVCacheManager(runner)
        self._cached = manager.get_kv_cache_spec()
        self._shared = dict(manager.shared_kv_cache_layers)
        size = self._job["tensor_parallel"]
        self.page_tokens = config.cache_config.block_size
        self.page_bytes = sum(spec.page_size_bytes for spec in self._cached.values()) / size
        text = config.model_config.hf_text_config
        types = getattr(text, "layer_types", None) or ["full_attention"] * self.layers
        self.token_bytes = {
            types[int(name.rpartition(".")[2])]: spec.page_size_bytes / size / spec.block_size
            for name, spec in self._cached.items()
        }

    def step(self, bucket: dict[str, Any], pages: int) -> tuple[Any, ...]:
        """Lower the step of a bucket, and return the arguments of `_compiled`."""
        import jax
        from jax import numpy as jnp
        from tpu_inference.layers.common.attention_metadata import AttentionMetadata
        from tpu_inference.layers.common.sharding import ShardingAxisName as Axis
        from tpu_inference.runner.kv_cache import get_kv_cache_shape_with_mesh
        from tpu_inference.utils import to_jax_dtype

        started = time.monotonic()
        caches = []
        for spec in self._cached.values():
            dtype = to_jax_dtype(spec.dtype)
            sizes = (pages, spec.block_size, spec.num_kv_heads, spec.head_size)
            shape = get_kv_cache_shape_with_mesh(self._mesh, *sizes, dtype)
            caches.append(self._array(shape, dtype, Axis.BATCH, Axis.KV_CONTEXT, Axis.KV_HEAD))
        sequences = max(self._job["max_num_seqs"], LEAST_SEQUENCES)
        pages_of_one = -(-self._job["max_model_len"] // self.page_tokens)
        tokens = bucket["tokens"]

        def whole(size: int) -> Any:
            return self._array((size,), jnp.int32, Axis.BATCH)

        positions = self._array((tokens,), jnp.int32, Axis.ATTN_DATA)
        metadata = AttentionMetadata(
            input_positions=positions,
            block_tables=whole(sequences * pages_of_one),
            seq_lens=whole(sequences),
            query_start_loc=whole(sequences + 1),
            request_distribution=whole(3),
            padded_num_reqs=sequences,
        )
        index = {name: number for number, name in enumerate(self._cached)}
        index |= {name: index[source] for name, source in self._shared.items()}
        # model_fn picks a step by the caches' shardings, and calls it. Its inner picker returns the step.
        pick = self._interface.model_fn
        cells = dict(zip(pick.__code__.co_freevars, pick.__closure__, strict=True))
        with jax.set_mesh(self._mesh):
            step = cells["_resolve_step_fn"].cell_contents(caches, True)
            # There are no image embeddings, no adapters, and no results of an earlier pipeline stage.
            arguments = (self._weights, caches, whole(tokens), metadata, None, positions)
            lowered = step.lower(*arguments, tuple(index.items()), None, None, True, True)
        return lowered, bucket["kind"], tokens, self._file(bucket["kind"], tokens), started

    def head(self) -> tuple[Any, ...]:
        """Lower the program of the logits, and return the arguments of `_compiled`."""
        import jax
        from jax import numpy as jnp
        from tpu_inference.layers.common.sharding import ShardingAxisName as Axis

        started = time.monotonic()
        rows = max(self._job["max_num_seqs"], LEAST_SEQUENCES)
        shape = (rows, self._config.model_config.get_hidden_size())
        hidden = self._array(shape, jnp.bfloat16, Axis.ATTN_DATA, None)
        with jax.set_mesh(self._mesh):
            lowered = self._interface.compute_logits_fn.lower(self._weights, hidden, None)
        return lowered, "head", rows, self._file("head", rows), started

    def _array(self, shape: tuple[int, ...], dtype: Any, *axes: Any) -> Any:
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        sharding = NamedSharding(self._mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def _file(self, kind: str, tokens: int) -> Path:
        return self._folder / f"{kind}-{tokens}-{self.layers}.hlo"


def _vllm_config(job: dict[str, Any], layers: int, folder: Path) -> Any:
    """Return vLLM's configuration of a model with `layers` layers, checked by vLLM and its TPU platform."""
    from vllm.engine.arg_utils import EngineArgs

    config = json.loads(json.dumps(job["config"]))
    text = config.get("text_config", config)
    text["num_hidden_layers"] = layers
    if text.get("layer_types"):
        text["layer_types"] = text["layer_types"][:layers]
    model = folder / f"model-{layers}"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    return EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        tensor_parallel_size=job["tensor_parallel"],
        kv_cache_dtype=job["kv_cache_dtype"],
        max_model_len=job["max_model_len"],
        max_num_seqs=job["max_num_seqs"],
        max_num_batched_tokens=job["max_num_batched_tokens"],
        block_size=job["page_tokens"],
    ).create_engine_config()


if __name__ == "__main__":
    main()
