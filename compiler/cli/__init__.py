"""The commands of `recipe`, a module each, how they speak, and how they end."""

import gc

gc.set_threshold(200_000)
"""Most of what a command makes lives until its end: looking for garbage often is a tenth of its time."""
