"""Fixtures for all tests of several processes: one place, and one process to fork from."""

from tests.runtime.conftest import lives, place

__all__ = ["lives", "place"]
