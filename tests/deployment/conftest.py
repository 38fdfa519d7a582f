"""The stand-ins of vLLM that tests/clients has."""

from tests.clients.conftest import fake, no_key

__all__ = ["fake", "no_key"]
