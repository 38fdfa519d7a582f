"""Arrays that are only shapes, with the shardings that their model's metadata gives them."""

from __future__ import annotations

from typing import Any


def placed(tree: Any, mesh: Any) -> Any:
    """A state of flax, each array a ShapeDtypeStruct with its sharding on a mesh."""
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
    """An array of a batch: its rows over fsdp; a scalar whole."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    spec = PartitionSpec("fsdp") if shape else PartitionSpec()
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def batch(rows: int, length: int, mesh: Any) -> dict[str, Any]:
    """A micro-batch, as batch_loss takes it."""
    import jax.numpy as jnp

    ids = by_row((rows, length), jnp.int32, mesh)
    return {
        "tokens": ids,
        "positions": ids,
        "segment_ids": ids,
        "loss_mask": by_row((rows, length), bool, mesh),
        "norm": by_row((), jnp.float32, mesh),
    }
