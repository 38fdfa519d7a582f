"""The persistent compilation cache: a program that was compiled once is read back instead of compiled.

jax's cache keys cover everything that the executable depends on: the program (with shapes and shardings,
without names and source lines), the versions of jax and of the backend's compiler, compile options and XLA
flags, the kind and number of devices and their topology. So recipes can share a cache, a cache can be moved,
and entries never have to be removed by hand.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

FOLDER = "xla"
"""The subfolder of a cache directory; tokenized data is next to it."""


def cache_directory(cache: str | None, output: Path) -> str | None:
    """Return the place of caches: an absolute local path, a gs:// address, or None for nowhere.

    Args:
        cache: the recipe's cache.directory; a relative one is relative to `output`.
    """
    if cache is None or "://" in cache:
        return cache
    return str((output / Path(cache).expanduser()).resolve())


def keep_compiled(directory: str | None) -> None:
    """Cache programs compiled from now on under DIRECTORY/xla. None does nothing.

    An unreadable or unwritable cache costs time but never stops a run: jax warns and compiles.
    """
    if directory is None:
        return
    import jax

    folder = os.path.join(directory, FOLDER)
    if "://" not in folder and not _writable(folder):
        print(f"note: {folder} cannot be written: every run compiles its programs again", file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_dir", folder)
    # By default jax keeps only what took a second or more to compile: small programs would not be kept.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_raise_persistent_cache_errors", False)
    # XLA's own caches are for GPUs, and put their path into every key: a copied cache would not be used.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def _writable(folder: str) -> bool:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)
