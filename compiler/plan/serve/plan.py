"""`recipe plan --serve`: plan a server by compiling tpu-inference's own step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recipec.compiler.lowering.program import Program
from recipec.compiler.plan.serve.compile import Run, Say
from recipec.compiler.plan.serve.configuration import serving
from recipec.compiler.plan.serve.results import COMPILED_SERVING, SERVING_SEARCH


@dataclass(frozen=True)
class PlannedServer:
    """A planned server, for printing and for JSON.

    Attributes:
        sections: (title, text) of each section.
        data: a CompiledServing or a ServingSearch as JSON values.
    """

    sections: list[tuple[str, str]]
    data: dict[str, Any]


def plan_serve(
    program: Program, exact: bool = False, search: bool = False, say: Say = print, run: Run | None = None
) -> PlannedServer:
    """Plan a recipe's server.

    Args:
        program: the program of a recipe with a `serve` section.
        exact: compile every layer, instead of extrapolating from two depths.
        search: also try other parallelism, cache types and decode blocks.
        say: called with progress messages, one sentence at a time.
        run: answers a job in place of a worker.

    Raises:
        ArtifactError: the server cannot be planned by compiling.
    """
    from recipec.compiler.plan.serve import compiled_text
    from recipec.compiler.plan.serve import search as serve_search

    if search:
        found = serve_search.search(program, exact, say, run)
        text = compiled_text.search_text(found)
        return PlannedServer(
            [("Serving, searched by compiling", text)], SERVING_SEARCH.dump_python(found, mode="json")
        )
    planned = serving(program, exact, say, run)
    text = compiled_text.text(planned)
    return PlannedServer([("Serving, compiled", text)], COMPILED_SERVING.dump_python(planned, mode="json"))
