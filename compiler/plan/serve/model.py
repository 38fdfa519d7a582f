"""Build tpu-inference's model and serving step without weights, for a TPU that this machine does not have.

Only worker.py uses this module, in the serving environment. It imports nothing of this project. All code is
tpu-inference's own, except functions that ask for a TPU or for weights. `patch` replaces them and says why.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LEAST_SEQUENCES = 8
"""The fewest sequences that tpu-inference's runner has room for (MIN_NUM_SEQS)."""


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
        token_bytes: as in ServeAnswer.
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
        """Lower the step of a bucket, and return the arguments of `_compiled` in worker.py."""
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
        """Lower the program of the logits, and return the arguments of `_compiled` in worker.py."""
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
