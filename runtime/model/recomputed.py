"""Tunix's own policies of what the backward pass recomputes; remat.py has further ones.

Tunix has none, block (attention and feed-forward block each recomputed from its input) and decoder (each
layer recomputed from its input).
"""

from __future__ import annotations

OF_TUNIX = ("none", "block", "decoder")

PROJECTION = "projection"
"""Name of each projection's output, the sum of its weight's product and its adapter's delta, and of the
adapter's product with A."""
