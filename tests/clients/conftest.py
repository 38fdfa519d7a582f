from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from recipec.runtime.clients.client import KEY_VARIABLE
from tests.clients.fake_vllm import FakeVllm, Start


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the key that the tests' user may have."""
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


@pytest.fixture
def fake() -> Iterator[Start]:
    """Return a function that starts servers: fake(["tuned"], key="secret")."""
    with ExitStack() as stack:

        def start(*arguments: Any, **keywords: Any) -> FakeVllm:
            return stack.enter_context(FakeVllm(*arguments, **keywords))

        yield start
