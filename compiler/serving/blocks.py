"""Block sizes of the decode kernel: as a recipe sets them, and as tpu-inference 0.32 chooses them.

The kernel fetches a sequence's keys and values a block at a time. Blocks that lie wholly before a layer's
window are skipped, and no part of a block: with one block for the whole context nothing is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recipec.spec.language import Serve

VARIABLE = "RPA_V3_DECODE_BLOCK_SIZES"
"""tpu-inference reads the sizes from it: queries and tokens of a block, and of what is computed at a time."""

BATCHED = "USE_BATCHED_RPA_KERNEL"
"""Switches to another kernel, which has no such sizes."""

SIZES = 4
SMALL_HEAD = 64
"""Heads of this size have a kernel of their own, which has no such sizes either."""

PEAK_BYTES = 16 * 2**20
"""Of a block, with which the kernel reaches the memory's bandwidth, by tpu-inference's own reckoning."""

LONG_CONTEXT = 8192
PAGES, LEAST_PAGE, LARGEST_PAGE = 16, 16, 256
"""tpu-inference makes 16 pages of the longest context, of 16 to 256 tokens; beyond 8192 tokens, of 16."""

PAGE_TABLE = 2**20 // 2 // 4
"""Pages of all sequences together that the chip's scalar memory has room to name."""


def decode_blocks(serve: Serve) -> tuple[int, ...] | None:
    """The sizes that a recipe sets, by its key or by the environment variable; None where it sets none.

    Raises:
        ValueError: the variable does not hold four positive whole numbers with commas between them.
    """
    if serve.decode_block_sizes is not None:
        return tuple(serve.decode_block_sizes)
    given = serve.env.get(VARIABLE)
    if not given:
        return None
    sizes = tuple(int(part) for part in given.split(","))
    if len(sizes) != SIZES or min(sizes) < 1:
        raise ValueError(f"{VARIABLE} holds {len(sizes)} numbers: {given}")
    return sizes


def spelled(sizes: tuple[int, ...]) -> str:
    """The sizes as the variable holds them."""
    return ",".join(map(str, sizes))


def environment(serve: Serve) -> dict[str, str]:
    """The recipe's variables, with the one that `serve.decode_block_sizes` stands for."""
    if serve.decode_block_sizes is None:
        return dict(serve.env)
    return {VARIABLE: spelled(tuple(serve.decode_block_sizes)), **serve.env}


def batched_kernel(serve: Serve) -> bool:
    """Whether another kernel is asked for, which takes no block sizes."""
    return serve.env.get(BATCHED, "").lower() in ("1", "true")


def page_tokens(serve: Serve) -> int:
    """Tokens of a page of the cache: by the recipe's flag, or as tpu-inference chooses them."""
    for name, value in serve.extra_args.items():
        if str(name).replace("_", "-") == "block-size" and isinstance(value, int) and value > 0:
            return value
    length = serve.max_model_len
    page = LEAST_PAGE
    if length <= LONG_CONTEXT:
        page = min(max(_power_of_two(length) // PAGES, LEAST_PAGE), LARGEST_PAGE)
    of_one = max(1, PAGE_TABLE // serve.max_num_seqs)
    return max(page, _power_of_two(-(-length // of_one)))


def default_block(serve: Serve, device_heads: int, head_dim: int, number_bytes: int) -> int:
    """Tokens of a decode block where nothing is set: on v5e and later chips.

    Args:
        device_heads: key/value heads that a device stores.
        head_dim: padded to 128 numbers.
        number_bytes: of one in the cache.
    """
    packing = 4 // number_bytes
    slots = _power_of_two(-(-2 * device_heads // packing) * packing)
    page = page_tokens(serve)
    longest = -(-serve.max_model_len // page) * page
    block = min(PEAK_BYTES * packing // 4 // head_dim // slots, longest)
    return -(-block // page) * page


def read_tokens(context: float, window: int | None, block: int | None) -> float:
    """Tokens of a sequence that a decode step reads in a layer.

    Args:
        window: tokens that the layer sees, None for all.
        block: tokens of a block; None where blocks are never skipped.
    """
    if window is None or block is None:
        return context
    return context - max(0.0, context - window) // block * block


def _power_of_two(number: int) -> int:
    """The least that is not below the number."""
    return 1 << (number - 1).bit_length() if number > 1 else 1
