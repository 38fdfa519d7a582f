"""Write the text of `recipe plan --search`: the front, the other outcomes, and the best lines to paste."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from recipec.compiler.lowering.program import Program
from recipec.compiler.plan.fit import yaml_lines
from recipec.compiler.plan.planner import settings
from recipec.compiler.plan.results import Point, Search
from recipec.compiler.plan.units import aligned, duration, wrapped
from recipec.compiler.wording import plural

STATUSES = ("compiled", "too large", "pruned", "refused", "failed")
REASONS = 6
"""How many reasons of refused and of failed configurations are shown."""
LEGEND = (
    "mesh: {axes}. ms/token: milliseconds a real token, over all devices. step: seconds of a "
    "micro-batch. GiB, HBM: of each device, and the share of its memory. {price} waits: seconds of a step "
    "that the device waits for collectives and copies, a part of `step`."
)


def text(program: Program, found: Search) -> str:
    """Return the whole text, in at most 100 columns.

    Args:
        program: the program of the unchanged recipe.
    """
    sections = [list(_front(program, found)), list(_standing(program, found)), list(_best(program, found))]
    sections.append(list(_rest(found)))
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def _front(program: Program, found: Search) -> Iterator[str]:
    yield from wrapped(
        "Configurations that no other beats in time, memory and cost: estimates of the compiler; "
        "nothing was measured on a TPU"
    )
    if not found.front:
        yield "  none: nothing that was compiled fits"
        return
    yield from _table(program, found, found.front)
    price = _price(program, found.points[found.front[0]])[0]
    said = (
        "US$/M: of a million real tokens."
        if price == "US$/M"
        else f"{price}: seconds of all devices together for a million real tokens; there is no price."
    )
    yield from wrapped(LEGEND.format(axes=" x ".join(program.recipe.mesh.axes), price=said))


def _standing(program: Program, found: Search) -> Iterator[str]:
    """Say where the unchanged recipe is among the results."""
    if found.baseline is None:
        point = next((point for point in found.points if not point.sets), None)
        reason = f": {point.reason}" if point and point.reason else ""
        yield from wrapped(f"The recipe as it stands has no estimate{reason}.")
    elif found.front and found.front[0] == found.baseline:
        yield "The recipe as it stands is the fastest of them."
    elif found.baseline in found.front:
        place = found.front.index(found.baseline) + 1
        yield f"The recipe as it stands is number {place} of them. {_gain(found)}"
    else:
        yield f"The recipe as it stands is not one of them. {_gain(found)}"
        yield from _table(program, found, [found.baseline])


def _gain(found: Search) -> str:
    assert found.baseline is not None
    fastest, own = (found.points[i].seconds_per_token for i in (found.front[0], found.baseline))
    assert fastest is not None and own is not None
    return f"The fastest takes {fastest / own:.3f} times its time a token."


def _best(program: Program, found: Search) -> Iterator[str]:
    """Show the recipe lines of the fastest configuration."""
    if not found.front or not found.points[found.front[0]].sets:
        return
    best = found.points[found.front[0]]
    yield "The fastest, as lines of the recipe:"
    yield from (f"  {line}" for line in yaml_lines(best.sets))
    values, changed = settings(program), _values(best.sets)
    rows = "train.global_batch_size"
    if rows in changed:
        yield from wrapped(
            f"It raises {rows} from {values[rows]} to {changed[rows]}: another optimization, with fewer "
            "steps over the same data."
        )


def _kernel(values: Mapping[str, str]) -> str:
    """Return a configuration's attention, with the block size unless it is the accelerator's own."""
    block = values["model.attention_block"]
    return values["model.attention"] + ("" if block == "null" else f" {block}")


def _rest(found: Search) -> Iterator[str]:
    counts = Counter(point.status for point in found.points)
    words = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    total = plural(len(found.points), "configuration")
    yield f"{total} in {duration(found.seconds)}: {words or 'none was looked at'}."
    for note in found.notes:
        yield from wrapped(note)
    for status in ("refused", "failed"):
        reasons = Counter(point.reason for point in found.points if point.status == status)
        for reason, count in reasons.most_common(REASONS):
            yield from wrapped(f"{status}, {count} x: {reason}", indent="  ")
        if len(reasons) > REASONS:
            yield f"  {status}: and {len(reasons) - REASONS} reasons more"


def _table(program: Program, found: Search, indices: Sequence[int]) -> list[str]:
    base = settings(program)
    every = [base | _values(found.points[i].sets) for i in found.front]
    raised = any(values["train.global_batch_size"] != base["train.global_batch_size"] for values in every)
    price = _price(program, found.points[indices[0]])[0]
    head = ["mesh", "micro", *(["rows"] if raised else []), "remat", "attn.", "flags", "ms/token", "step"]
    head += ["GiB", "HBM", "MFU", price, "waits"]
    rows = [_row(program, found.points[i], base, raised) for i in indices]
    return aligned([head, *rows], "<>" + (">" if raised else "") + "<<<>>>>>>>")


def _row(program: Program, point: Point, base: Mapping[str, str], raised: bool) -> list[str]:
    values = {**base, **_values(point.sets)}
    memory = point.memory
    assert memory and point.seconds_per_token and point.step_seconds and point.mfu is not None
    return [
        " x ".join(re.findall(r"\d+", values["mesh.axes"])),
        values["train.micro_batch_size"],
        *([values["train.global_batch_size"]] if raised else []),
        values["remat.policy"],
        _kernel(values),
        values["xla.profile"],
        f"{1000 * point.seconds_per_token:.4f}",
        f"{point.step_seconds:.3f}",
        f"{memory.used / 2**30:.1f}",
        f"{100 * memory.share:.0f} %",
        f"{100 * point.mfu:.0f} %",
        _price(program, point)[1],
        "" if point.exposed_seconds is None else f"{point.exposed_seconds:.3f}",
    ]


def _price(program: Program, point: Point) -> tuple[str, str]:
    """Return the cost of a million tokens: the column's name, and the figure."""
    if point.usd_per_million_tokens is not None:
        return "US$/M", f"{point.usd_per_million_tokens:.3f}"
    return "dev-s/M", f"{1e6 * (point.seconds_per_token or 0) * program.accelerator.devices:.0f}"


def _values(sets: Sequence[str]) -> dict[str, str]:
    return {path: value for path, _, value in (argument.partition("=") for argument in sets)}
