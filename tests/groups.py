"""A pytest plugin for `make test`: it groups tests that one worker runs in sequence, long groups first.

Modules of a group share results that are expensive to make, so one worker runs all modules of a group. The
longest groups start first, so that no worker is left with one at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

LONG = (
    *("test_decoder", "test_parity", "test_attention", "test_merge_parity", "test_peft_import"),
    *("test_catalog", "test_trainer", "test_quantize", "test_full", "test_odd_values"),
)
"""Modules that take a worker longest."""

OTHERS = "others"
GROUPS: Mapping[str, tuple[str, ...]] = {
    # An artifact, its run, and the process that others are forked from.
    "runs": (
        *("test_robust", "test_damaged_steps", "test_train_run", "test_maintenance", "test_elastic"),
        *("test_local_saving", "test_group"),
    ),
    **{name: (name,) for name in LONG},
    # Each module's syntax tree, parsed once.
    "trees": ("test_layers", "test_docs_architecture", "test_codes"),
    "test_peft_import": ("test_peft_import", "test_peft_import_forms", "test_peft_import_refused"),
    OTHERS: (),
    # These start after the mypy run of `make test` has ended.
    "test_typed": ("test_typed",),
}
"""Modules by group. Any other module forms its own group, which is scheduled at the place of OTHERS."""


class Groups(LoadScopeScheduling):
    """A scheduler that gives a group to one worker.

    pytest-xdist's own groups, by marks, have no effect with pytest 9.2.
    """

    def __init__(self, config: pytest.Config, log: Any, groups: Mapping[str, Iterable[str]]) -> None:
        config.option.loadscopereorder = False  # keep the order of the tests; do not sort groups by size
        super().__init__(config, log)
        self._groups = groups

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid, self._groups)


def check(groups: Mapping[str, Iterable[str]]) -> None:
    """Raise an error if a group names a module that does not exist."""
    there = {path.stem for path in Path(__file__).parent.rglob("test_*.py")}
    if missing := sorted({module for modules in groups.values() for module in modules} - there):
        raise pytest.UsageError(f"groups of tests name modules that are not there: {', '.join(missing)}")


def group(nodeid: str, groups: Mapping[str, Iterable[str]]) -> str:
    """Return the group of a test, or its module's path."""
    path = nodeid.partition("::")[0]
    module = PurePosixPath(path).stem
    return next((name for name, modules in groups.items() if module in modules), path)


def put_in_order(items: list[pytest.Item], groups: Mapping[str, Iterable[str]]) -> None:
    """Sort tests by their groups."""
    order = {name: number for number, name in enumerate(groups)}
    items.sort(key=lambda item: order.get(group(item.nodeid, groups), order[OTHERS]))


def pytest_configure() -> None:
    check(GROUPS)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the modules as pytest rewrote them, also where Python may not write byte code.

    Rewriting all of them takes each worker four seconds.
    """
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = before


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups:
    return Groups(config, log, GROUPS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    put_in_order(items, GROUPS)
