"""Block sizes of the decode kernel: those that a recipe sets, and those that tpu-inference 0.32 chooses.

The kernel fetches a sequence's keys and values one block at a time. It skips a block only if the whole block
lies before a layer's window. With one block for the whole context it therefore skips nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recipec.spec.language import Serve

VARIABLE = "RPA_V3_DECODE_BLOCK_SIZES"
"""tpu-inference reads the block sizes from it: queries and tokens of a block, then of one computation."""

BATCHED = "USE_BATCHED_RPA_KERNEL"
"""Switches to another kernel, which does not take block sizes."""

SIZES = 4
SMALL_HEAD = 64
"""Heads of this size have their own kernel, which does not take block sizes either."""

PEAK_BYTES = 16 * 2**20
"""Block size at which the kernel reaches the memory's bandwidth, by tpu-inference's own estimate."""

LONG_CONTEXT = 8192
PAGES, LEAST_PAGE, LARGEST_PAGE = 16, 16, 256
"""tpu-inference divides the longest context into 16 pages of 16 to 256 tokens; beyond 8192 tokens, of 16."""

PAGE_TABLE = 2**20 // 2 // 4
"""Pages of all sequences together that the page table in the chip's scalar memory can list."""


def decode_blocks(serve: Serve) -> tuple[int, ...] | None:
    """Return the sizes that a recipe sets, by its key or by the environment variable; None if it sets none.

    Raises:
        ValueError: when the variable does not hold four positive integers separated by commas.
    """
    if serve.decode_block_sizes is not None:
        return tuple(serve.decode_block_sizes)
    text = serve.env.get(VARIABLE)
    if not text:
        return None
    sizes = tuple(int(part) for part in text.split(","))
    if len(sizes) != SIZES or min(sizes) < 1:
        raise ValueError(f"{VARIABLE} holds {len(sizes)} numbers: {text}")
    return sizes


def spelled(sizes: tuple[int, ...]) -> str:
    """Return the sizes in the format of the environment variable."""
    return ",".join(map(str, sizes))


def environment(serve: Serve) -> dict[str, str]:
    """Return the recipe's environment variables, with the one that `serve.decode_block_sizes` sets."""
    if serve.decode_block_sizes is None:
        return dict(serve.env)
    return {VARIABLE: spelled(tuple(serve.decode_block_sizes)), **serve.env}


def batched_kernel(serve: Serve) -> bool:
    """Return whether the recipe selects the other kernel, which takes no block sizes."""
    return serve.env.get(BATCHED, "").lower() in ("1", "true")


def page_tokens(serve: Serve) -> int:
    """Return the tokens in a page of the cache: by the recipe's flag, or as tpu-inference chooses them."""
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
    """Return the tokens of a decode block if the recipe sets none, on v5e and later chips.

    Args:
        device_heads: key/value heads that one device stores.
        head_dim: head size, padded to a multiple of 128.
        number_bytes: bytes of one number in the cache.
    """
    packing = 4 // number_bytes
    slots = _power_of_two(-(-2 * device_heads // packing) * packing)
    page = page_tokens(serve)
    longest = -(-serve.max_model_len // page) * page
    block = min(PEAK_BYTES * packing // 4 // head_dim // slots, longest)
    return -(-block // page) * page


def read_tokens(context: float, window: int | None, block: int | None) -> float:
    """Return how many tokens of a sequence a decode step reads in one layer.

    Args:
        window: tokens that the layer attends to; None for all.
        block: tokens of a block; None if the kernel never skips blocks.
    """
    if window is None or block is None:
        return context
    return context - max(0.0, context - window) // block * block


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length() if number > 1 else 1
