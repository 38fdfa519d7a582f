"""Abstract arrays with the shardings of their model's metadata."""

from __future__ import annotations

from typing import Any


def placed(tree: Any, mesh: Any) -> Any:
    """Return a flax state whose arrays are ShapeDtypeStructs with their shardings on a mesh."""
    import jax
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec

    return jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec or PartitionSpec())
        ),
        tree,
        nnx.get_partition_spec(tree),
    )


def by_row(shape: tuple[int, ...], dtype: Any, mesh: Any) -> Any:
    """Return an abstract array of a batch, with rows over fsdp. A scalar is replicated."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    spec = PartitionSpec("fsdp") if shape else PartitionSpec()
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def batch(rows: int, length: int, mesh: Any) -> dict[str, Any]:
    """Return a micro-batch for batch_loss."""
    import jax.numpy as jnp

    ids = by_row((rows, length), jnp.int32, mesh)
    return {
        "tokens": ids,
        "positions": ids,
        "segment_ids": ids,
        "loss_mask": by_row((rows, length), bool, mesh),
        "norm": by_row((), jnp.float32, mesh),
    }
