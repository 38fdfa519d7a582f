"""A pytest plugin for `make e2e` and `make nightly`: it groups tests by worker, and shows what tests print.

Tests of a group share something expensive (a fine-tuned model, a Docker engine), or take so much memory that
no two of them may run at once. Workers take the groups in this order, the long ones first, so that no long
group remains at the end. The end of a session shows a part of what tests print, and build/e2e/ holds all of
it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests import groups
from tests.e2e import disk

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "build" / "e2e" / "output.txt"

LINES = 14
"""The number of last lines of a test's output to show."""

GROUPS: dict[str, tuple[str, ...]] = {
    # Whole runs: the quickstart, three backends, one run of each family.
    **{name: (name,) for name in ("test_quickstart", "test_backends", "test_parity")},
    # Compilations for TPUs, with up to 5 GB in each of two processes, and a checkpoint with 10 GB of memory.
    "compile": (
        "test_recipes_plans",
        "test_serve_plan",
        "test_plan",
        "test_tpu_compile",
        "test_startup_memory",
    ),
    # The fine-tuned model, and vLLM's servers on the CPU.
    "gemma3": ("test_gemma3_270m", "test_vllm"),
    # The Docker engine, which a worker keeps to its end. A second worker would wait until then.
    "docker": ("test_serve_containers", "test_serve_pin"),
    groups.OTHERS: (),
}
"""Modules by group. Any other module forms its own group, which is scheduled at the place of OTHERS."""


FIXTURES = {"engine": "docker", "tuned": "gemma3"}
"""The group of every test that uses one of these fixtures of a session."""


def pytest_configure(config: pytest.Config) -> None:
    """End the session if the disk is too small."""
    groups.check(GROUPS)
    started_by_another = hasattr(config, "workerinput")
    command = "nightly" if config.option.markexpr == "nightly" else "e2e"
    if not started_by_another and (missing := disk.shortage(command)):
        raise pytest.UsageError(missing)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> groups.Groups:
    return groups.Groups(config, log, GROUPS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        names = {FIXTURES[name] for name in FIXTURES.keys() & getattr(item, "fixturenames", ())}
        if item.path.parent == Path(__file__).parent and names - {groups.group(item.nodeid, GROUPS)}:
            raise pytest.UsageError(f"{item.nodeid} must be in the group {', '.join(names)}")
    groups.put_in_order(items, GROUPS)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print before pytest's own last lines. The workers' reports carry the captured output."""
    stats = terminalreporter.stats
    said: dict[str, str] = {}
    failed = {report.nodeid for kind in ("failed", "error") for report in stats.get(kind, [])}
    for report in (*stats.get("passed", []), *stats.get("", [])):
        text = "\n".join(text for title, text in report.sections if "stdout" in title).strip()
        if text and report.nodeid not in failed:
            # A later phase's report includes the output of earlier phases.
            said[report.nodeid] = max(said.get(report.nodeid, ""), text, key=len)
    if not said:
        return
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text("".join(f"{name}\n\n{text}\n\n" for name, text in said.items()), encoding="utf-8")
    terminalreporter.write_sep("=", f"figures; all that was printed is in {OUTPUT.relative_to(ROOT)}")
    for name, text in said.items():
        terminalreporter.write_line(name, bold=True)
        lines = [line for line in re.split(r"\n+", text) if line.strip()]
        for line in lines[-LINES:]:
            terminalreporter.write_line(f"  {line[:160]}")
