"""Tests of a schedule's timeline: what is hidden, and what the core waits for."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from recipec.compiler.plan.results import Moved, Timeline
from recipec.compiler.plan.schedule import (
    SCHEDULE,
    Exposed,
    Loop,
    Schedule,
    Start,
    Step,
    Transfer,
    Wait,
    Work,
    Worked,
)
from recipec.compiler.plan.timeline import SPANS, Reached, timeline

FULL = Reached()


def transfer(name: str, seconds: float, *along: str, kind: str = "all-gather") -> Transfer:
    axes = () if kind in ("copy", "host") else ("fsdp",)
    return Transfer(kind, name, axes, "dcn" in along, 1000.0, seconds, along)


def run(*steps: Step, transfers: tuple[Transfer, ...] = (), reached: Reached = FULL) -> Timeline:
    return timeline(Schedule(steps, transfers), reached)


def exposed(found: Timeline) -> dict[str, float]:
    return {one.name: one.exposed for one in found.transfers}


GATHER = transfer("w", 3.0, "0")


@pytest.mark.parametrize(("work", "wait"), [(0.0, 3.0), (1.0, 2.0), (3.0, 0.0), (5.0, 0.0)])
def test_wait_is_the_transfer_time_that_work_does_not_hide(work: float, wait: float) -> None:
    found = run(Start(0, 1), Work(products=work), Wait(1), transfers=(GATHER,))
    assert found.exposed == pytest.approx(wait) and found.seconds == pytest.approx(max(work, 3.0))
    assert found.transfers == (Moved("all-gather", "w", ("fsdp",), False, 1, 1000.0, 3.0, wait),)


@pytest.mark.parametrize(
    ("along", "wait"),
    [
        (("0", "0"), 5.0),
        (("0", "1"), 2.0),
        (("01", "1"), 5.0),
        (("0", "dcn"), 2.0),
        (("hbm", "0"), 2.0),
        (("hbm", "hbm"), 5.0),
        (("host", "hbm"), 2.0),
    ],
)
def test_transfers_on_the_same_link_or_memory_queue(along: tuple[str, str], wait: float) -> None:
    """Queue two transfers of 3 s next to 1 s of work: 5 s of waiting in sequence, 2 s in parallel."""
    both = [("0", "1") if name == "01" else (name,) for name in along]
    transfers = tuple(transfer(f"t{i}", 3.0, *names) for i, names in enumerate(both))
    found = run(Start(0, 1), Start(1, 2), Work(memory=1.0), Wait(1), Wait(2), transfers=transfers)
    assert found.exposed == pytest.approx(wait)
    assert found.seconds == pytest.approx(1.0 + wait)


def test_transfer_without_links_takes_no_time_and_has_no_span() -> None:
    found = run(Exposed(0), Exposed(0), transfers=(transfer("w", 0.0),))
    assert found.seconds == 0.0 and found.spans == () and found.transfers[0].count == 2


def test_waits_are_summed_by_weight_and_sorted_longest_first() -> None:
    transfers = (
        GATHER,
        transfer("v", 4.0, "0"),
        transfer("w", 1.0, "1"),
        transfer("w", 1.0, "1", kind="host"),
    )
    found = run(*map(Exposed, (0, 1, 0, 2, 3)), transfers=transfers)
    assert [(one.kind, one.name, one.count, one.exposed) for one in found.transfers] == [
        ("all-gather", "w", 3, 7.0),
        ("all-gather", "v", 1, 4.0),
        ("host", "w", 1, 1.0),
    ]
    assert found.transfers[0].bytes == 3000.0
    assert (found.exposed_in(True), found.exposed_in(False)) == (11.0, 1.0)


def test_reached_rates_scale_work_and_transfer_times() -> None:
    transfers = (GATHER, transfer("c", 1.0, "hbm", kind="copy"), transfer("h", 1.0, "host", kind="host"))
    steps = (Work(1.0, 1.0, 1.0), Exposed(0), Exposed(1), Exposed(2))
    found = run(*steps, transfers=transfers, reached=Reached(0.5, 0.25, 0.2, 0.1, 0.125))
    assert (found.products, found.memory, found.kernels) == pytest.approx((2.0, 4.0, 5.0))
    assert exposed(found) == pytest.approx({"w": 30.0, "c": 4.0, "h": 8.0})
    assert found.seconds == pytest.approx(2 + 4 + 5 + 30 + 4 + 8)


def test_loop_counts_work_and_transfers_of_every_iteration() -> None:
    """Start and await a transfer in each iteration."""
    turn = (Start(0, 1), Work(products=1.0, memory=0.5), Wait(1), Work(kernels=2.0))
    found = run(Work(products=7.0), Loop(30, turn), transfers=(GATHER,))
    assert (found.products, found.memory, found.kernels) == pytest.approx((37.0, 15.0, 60.0))
    assert found.transfers == (
        Moved("all-gather", "w", ("fsdp",), False, 30, 30_000.0, pytest.approx(90), pytest.approx(45)),
    )
    assert found.seconds == pytest.approx(7 + 30 * 5)


@pytest.mark.parametrize("times", [0, 1, 2])
def test_loop_of_zero_to_two_iterations_takes_proportional_time(times: int) -> None:
    found = run(Loop(times, (Exposed(0), Work(memory=1.0))), transfers=(GATHER,))
    assert found.seconds == pytest.approx(4.0 * times)


def test_transfer_started_in_one_iteration_is_awaited_in_the_next() -> None:
    """Receive in one iteration and wait in the next: the first iteration waits for nothing."""
    turn = (Wait(1), Start(0, 1), Work(products=2.0))
    found = run(Loop(50, turn), Wait(1), transfers=(transfer("g", 3.0, "dcn"),))
    assert found.products == pytest.approx(100.0)
    assert found.exposed == pytest.approx(50 * 1.0)


def test_transfer_started_before_a_loop_is_hidden_by_all_iterations() -> None:
    steps = (Start(0, 1), Loop(100, (Work(products=1.0),)), Wait(1))
    assert run(*steps, transfers=(transfer("w", 60.0, "0"),)).exposed == 0.0
    assert run(*steps, transfers=(transfer("w", 110.0, "0"),)).exposed == pytest.approx(10.0)
    # The links are free when the transfer ends, not when the loop ends.
    after = (*steps[:2], Start(1, 2), Work(products=5.0), Wait(2))
    found = run(*after, transfers=(transfer("w", 60.0, "0"), transfer("v", 5.0, "0")))
    assert found.exposed == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_loop_gives_the_same_times_as_its_unrolled_steps(seed: int) -> None:
    """Compare a loop with the same steps unrolled, each transfer awaited in its iteration."""
    chance = random.Random(seed)
    places = ("0", "1", "dcn", "hbm", "host")
    transfers = tuple(
        transfer(f"t{i}", chance.randint(1, 9), *chance.sample(places, chance.randint(1, 2)))
        for i in range(4)
    )

    def body(depth: int, mark: int) -> tuple[Step, ...]:
        steps: list[Step] = [Start(i, mark + i) for i in range(4)]
        steps += [Work(*(chance.randint(0, 5) for _ in range(3))) for _ in range(3)]
        steps += [Exposed(chance.randrange(4)), *(Wait(mark + i) for i in range(4))]
        if depth:
            steps.insert(chance.randrange(4, 8), Loop(chance.randint(1, 6), body(depth - 1, mark + 10)))
        return tuple(steps)

    def written_out(steps: tuple[Step, ...]) -> list[Step]:
        out: list[Step] = []
        for step in steps:
            out += step.times * written_out(step.body) if isinstance(step, Loop) else [step]
        return out

    looped = (Work(products=1.0), Loop(chance.randint(3, 9), body(2, 0)), Work(memory=1.0))
    short, long = run(*looped, transfers=transfers), run(*written_out(looped), transfers=transfers)
    assert short.seconds == pytest.approx(long.seconds)
    assert exposed(short) == pytest.approx(exposed(long))
    assert [replace(one, exposed=0.0) for one in sorted(short.transfers, key=lambda one: one.name)] == [
        replace(one, exposed=0.0, count=pytest.approx(one.count), seconds=pytest.approx(one.seconds))
        for one in sorted(long.transfers, key=lambda one: one.name)
    ]


def test_spans_match_the_simulated_start_and_duration() -> None:
    transfers = (GATHER, transfer("h", 1.0, "host", kind="host"), transfer("c", 1.0, "hbm", kind="copy"))
    steps = (Work(products=1.0), Start(0, 1), Start(1, 2), Start(2, 3), Work(0.0, 1.0, 0.5), Wait(1))
    found = run(*steps, transfers=transfers)
    drawn = {(span.lane, span.name): (span.start, span.seconds) for span in found.spans}
    assert drawn == {
        ("core", ""): (1.0, 1.0),  # the second one; neither has a name
        ("kernel", ""): (2.0, 0.5),
        ("links", "all-gather w"): (1.0, 3.0),
        ("host", "host h"): (1.0, 1.0),
        ("memory", "copy c"): (1.0, 1.0),
        ("wait", "all-gather w"): (2.5, 1.5),
    }
    last = max(found.spans, key=lambda span: span.start + span.seconds)
    assert last.start + last.seconds == pytest.approx(found.seconds)


def test_long_timeline_has_a_limited_number_of_spans() -> None:
    steps = [step for i in range(3000) for step in (Exposed(0), Work(products=1.0 + i % 3))]
    found = run(*steps, transfers=(GATHER,))
    assert len(found.spans) <= SPANS
    assert {span.lane for span in found.spans} == {"core", "links", "wait"}
    assert max(span.start + span.seconds for span in found.spans) == pytest.approx(found.seconds)


def test_operations_take_their_share_of_full_speed_the_longest_first() -> None:
    work = (Worked("norm", False, 4, 1.0), Worked("up", True, 2, 1.5))
    found = timeline(Schedule(worked=work), Reached(products=0.5, memory=0.25)).operations
    assert found == (Worked("norm", False, 4, 4.0), Worked("up", True, 2, 3.0))


def test_schedule_round_trips_through_json() -> None:
    steps = (Loop(3, (Start(0, 1), Work(1.0, 2.0, 3.0), Wait(1))), Exposed(0))
    kept = Schedule(steps, (GATHER,), uncounted_loops=1, costed=0.5)
    assert SCHEDULE.validate_json(SCHEDULE.dump_json(kept)) == kept
