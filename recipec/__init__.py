"""Compiles one YAML recipe into everything that fine-tunes and serves a language model on TPUs.

One name for five packages. In a checkout they are links to the folders next to this one.
"""

from pathlib import Path

ROOT = Path(__file__).absolute().parents[1]
"""A checkout, or the site-packages of what was installed."""
