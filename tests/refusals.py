"""What an action is refused with."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from recipec.runtime.errors import UserError


def refusal(action: Callable[[], object]) -> UserError:
    """Return the error of an action that must be refused."""
    with pytest.raises(UserError) as caught:
        action()
    return caught.value


def message(action: Callable[[], object]) -> str:
    """Return the text of that error."""
    return str(refusal(action))
