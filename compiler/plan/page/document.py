"""A plan as one HTML page that stands by itself: no network, no fonts, no scripts but its own."""

from __future__ import annotations

from collections.abc import Sequence

from recipec.compiler.pages import environment, script_hash
from recipec.compiler.plan import calibration
from recipec.compiler.plan.page import headline, memory, mesh, numbers, placements, roofline, time
from recipec.compiler.plan.page import search as searched
from recipec.compiler.plan.results import Plan, Search, Temporary


def page(plan: Plan, search: Search | None = None, serving: Sequence[tuple[str, str]] | None = None) -> str:
    """The page's HTML.

    Args:
        plan: of the recipe.
        search: what a search of its settings found.
        serving: sections on serving, each a title and text that keeps its lines.
    """
    template = environment().get_template
    script = template("pages/plan.js.j2").render()
    return template("pages/plan.html.j2").render(
        plan=plan,
        search=search,
        serving=serving or (),
        estimate=plan.estimate,
        calibration=calibration,
        headline=headline,
        memory=memory,
        mesh=mesh,
        numbers=numbers,
        placements=placements.groups(plan),
        roofline=roofline,
        searched=searched,
        time=time,
        temporaries=_temporaries(plan.estimate.largest),
        script=script,
        style=template("pages/plan.css.j2").render(),
        script_hash=script_hash(script),
    )


def _temporaries(largest: Sequence[Temporary]) -> list[tuple[Temporary, int]]:
    """The largest arrays, each with its bytes against the largest in percent."""
    most = max((one.bytes for one in largest), default=0)
    return [(one, round(100 * one.bytes / most) if most else 0) for one in largest]
