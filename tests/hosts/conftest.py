"""One place and one process to fork from, for all tests of several processes."""

from tests.runtime.conftest import lives, place

__all__ = ["lives", "place"]
