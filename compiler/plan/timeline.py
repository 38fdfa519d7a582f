"""Simulate one step: run a schedule at the rates that a generation's devices reach.

The core runs its operations in order. A started transfer runs in parallel with the core, as soon as the
resources that it occupies are free. Where the core needs the result of a transfer, it waits for the transfer
to end. This wait is exposed time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from recipec.compiler.plan.results import Moved, Span, Timeline
from recipec.compiler.plan.schedule import Exposed, Loop, Schedule, Start, Step, Transfer, Work, Worked

SPANS = 400
"""Spans that a timeline keeps for drawing, at most. Spans with the smallest gaps between them are joined."""
LONGEST = 40
"""Names of operations that a timeline keeps, at most."""
LANES = {"host": "host", "copy": "memory"}
"""The lane of a kind of transfer; other kinds are in the lane "links"."""


@dataclass(frozen=True)
class Reached:
    """The shares of full speed that a generation's devices reach, from published runs.

    Full speed is libtpu's cycles, or the manufacturer's figures.

    Attributes:
        products, memory, kernels, links, host: shares of full speed.
    """

    products: float = 1.0
    memory: float = 1.0
    kernels: float = 1.0
    links: float = 1.0
    host: float = 1.0


def timeline(schedule: Schedule, reached: Reached) -> Timeline:
    """Run a schedule, and return the time of its parts."""
    run = _Simulation(schedule.transfers, reached)
    run.steps(schedule.steps)
    return Timeline(
        products=run.work.products,
        memory=run.work.memory,
        kernels=run.work.kernels,
        transfers=tuple(sorted(run.moved.values(), key=lambda part: (-part.exposed, -part.seconds))),
        spans=tuple(_drawn(run.spans)),
        operations=tuple(
            sorted(_at_rates(schedule.worked, reached), key=lambda operation: -operation.seconds)[:LONGEST]
        ),
    )


def _at_rates(operations: Iterable[Worked], reached: Reached) -> Iterator[Worked]:
    for operation in operations:
        yield replace(
            operation,
            seconds=operation.seconds / (reached.products if operation.products else reached.memory),
        )


def combined(timelines: Sequence[Timeline], of: Callable[[Sequence[float]], float]) -> Timeline:
    """Combine timelines into one, figure by figure; the spans are the last timeline's.

    Args:
        of: computes a figure from the timelines' figures, in order. A result below 0 counts as 0.
    """

    def figure(figures: Sequence[float]) -> float:
        return max(0.0, of(figures))

    by_transfer = [
        {(m.kind, m.name, m.axes, m.over_dcn): m for m in timeline.transfers} for timeline in timelines
    ]
    moved = []
    for key in dict.fromkeys(key for moves in by_transfer for key in moves):
        transfers = [moves.get(key) or Moved(*key, 0, 0.0, 0.0, 0.0) for moves in by_transfer]
        figures = zip(*((m.count, m.bytes, m.seconds, m.exposed) for m in transfers), strict=True)
        moved.append(Moved(*key, *map(figure, figures)))
    return Timeline(
        products=figure([timeline.products for timeline in timelines]),
        memory=figure([timeline.memory for timeline in timelines]),
        kernels=figure([timeline.kernels for timeline in timelines]),
        transfers=tuple(sorted(moved, key=lambda m: (-m.exposed, -m.seconds))),
        spans=timelines[-1].spans,
    )


@dataclass
class _Simulation:
    transfers: tuple[Transfer, ...]
    reached: Reached
    now: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    ends: dict[int, tuple[int, float]] = field(default_factory=dict)
    work: Work = field(default_factory=Work)
    moved: dict[tuple[object, ...], Moved] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    def steps(self, steps: Iterable[Step]) -> None:
        for step in steps:
            if isinstance(step, Work):
                self._compute(step)
            elif isinstance(step, Start):
                self.ends[step.mark] = step.transfer, self._begin(step.transfer)
            elif isinstance(step, Exposed):
                self._wait(step.transfer, self._begin(step.transfer))
            elif isinstance(step, Loop):
                self._loop(step)
            elif step.mark in self.ends:
                self._wait(*self.ends.pop(step.mark))

    def _compute(self, step: Work) -> None:
        r = self.reached
        done = Work(step.products / r.products, step.memory / r.memory, step.kernels / r.kernels)
        for lane, seconds in (("core", done.products + done.memory), ("kernel", done.kernels)):
            if seconds:
                self.spans.append(Span(lane, "", self.now, seconds))
                self.now += seconds
        self.work += done

    def _begin(self, number: int) -> float:
        """Start a transfer now, and return the time at which it ends."""
        transfer = self.transfers[number]
        rate = {"hbm": self.reached.memory, "host": self.reached.host}
        share = rate.get(transfer.along[0], self.reached.links) if transfer.along else 1.0
        seconds = transfer.seconds / share
        start = max([self.now, *(self.busy.get(place, 0.0) for place in transfer.along)])
        self.busy.update(dict.fromkeys(transfer.along, start + seconds))
        self._add(transfer, 1, seconds, 0.0)
        if seconds:
            lane = LANES.get(transfer.kind, "links")
            self.spans.append(Span(lane, _named(transfer), start, seconds))
        return start + seconds

    def _wait(self, number: int, end: float) -> None:
        if end > self.now:
            transfer = self.transfers[number]
            self._add(transfer, 0, 0.0, end - self.now)
            self.spans.append(Span("wait", _named(transfer), self.now, end - self.now))
            self.now = end

    def _add(self, transfer: Transfer, count: float, seconds: float, exposed: float) -> None:
        key = (transfer.kind, transfer.name, transfer.axes, transfer.over_dcn)
        old = self.moved.get(key, Moved(*key, 0, 0.0, 0.0, 0.0))
        self.moved[key] = replace(
            old,
            count=old.count + count,
            bytes=old.bytes + count * transfer.bytes,
            seconds=old.seconds + seconds,
            exposed=old.exposed + exposed,
        )

    def _loop(self, loop: Loop) -> None:
        """Run a loop's body at most twice, and count the second turn for all that follow.

        The second turn starts with the transfers that the first turn left unfinished, as all later turns do.
        """
        for turn in range(min(2, loop.times)):
            before = replace(self, moved=dict(self.moved), busy=dict(self.busy), ends=dict(self.ends))
            self.steps(loop.body)
            if turn == 1 and loop.times > 2:
                self._again(before, loop.times - 2)

    def _again(self, before: _Simulation, times: int) -> None:
        """Count everything that happened since `before` again, `times` times."""
        work, moved = before.work, before.moved
        seconds = (self.now - before.now) * times
        self.work += (self.work + work * -1) * times
        for key, part in self.moved.items():
            old = moved.get(key, replace(part, count=0, bytes=0.0, seconds=0.0, exposed=0.0))
            self.moved[key] = replace(
                part,
                count=part.count + times * (part.count - old.count),
                bytes=part.bytes + times * (part.bytes - old.bytes),
                seconds=part.seconds + times * (part.seconds - old.seconds),
                exposed=part.exposed + times * (part.exposed - old.exposed),
            )
        self.spans.append(Span("loop", f"{times:,} more turns", self.now, seconds))
        self.now += seconds
        # Only transfers that started in this turn end later; older ones keep their end.
        for place, end in self.busy.items() - before.busy.items():
            self.busy[place] = end + seconds
        for mark, (number, end) in self.ends.items() - before.ends.items():
            self.ends[mark] = number, end + seconds


def _named(transfer: Transfer) -> str:
    return f"{transfer.kind} {transfer.name}".strip()


def _drawn(spans: list[Span]) -> list[Span]:
    """Reduce spans to at most about `SPANS`.

    Neighbors in a lane are joined if the gap between them is short. The name is the longer span's.
    """
    ordered = sorted(spans, key=lambda span: span.start)
    gap = max((span.start + span.seconds for span in ordered), default=0.0) / (4 * SPANS)
    while len(ordered) > SPANS:
        last: dict[str, int] = {}
        joined: list[Span] = []
        for span in ordered:
            at = last.get(span.lane)
            old = span if at is None else joined[at]
            if at is not None and span.start - (old.start + old.seconds) < gap:
                end = max(old.start + old.seconds, span.start + span.seconds)
                name = max(old, span, key=lambda drawn: drawn.seconds).name
                joined[at] = Span(span.lane, name, old.start, end - old.start)
            else:
                last[span.lane] = len(joined)
                joined.append(span)
        ordered, gap = joined, 2 * gap
    return ordered
