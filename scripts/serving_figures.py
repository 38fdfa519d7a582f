"""Compare the estimates of `recipe plan` for a server with published logs of vLLM-TPU.

    python -m scripts.serving_figures

docs/published_servers.json has the logs: each server's section `serve` as it ran, and what it logged. The
script writes the tables of docs/planning.md. Figures of servers whose settings are not known are in
`left_out`, each with the reason. Sizes are of all devices of a replica.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from recipec.compiler.lowering.facts import gather
from recipec.compiler.lowering.program import Program
from recipec.compiler.roofline.server_estimate import Server, server_of
from recipec.spec.load import load

PAGE = Path(__file__).parents[1] / "docs" / "planning.md"
LOGS = PAGE.with_name("published_servers.json")
BEGIN, END = "<!-- servers -->\n", "<!-- /servers -->"
GIB = 2**30


@dataclass(frozen=True)
class Figure:
    """A published figure with its estimate.

    Attributes:
        server: the server's key in LOGS.
        what: "weights" in GiB, "tokens" of the cache, or "TTFT" or "TPOT" in ms.
        load: of a time: the tokens in and out and the requests at once; otherwise ().
    """

    server: str
    what: str
    published: float
    estimate: float
    load: tuple[int, ...] = ()

    @property
    def error(self) -> float:
        """The estimate's relative error."""
        return self.estimate / self.published - 1


@cache
def logs() -> Mapping[str, Any]:
    """Return the published logs by server."""
    servers: dict[str, Any] = json.loads(LOGS.read_text(encoding="utf-8"))["servers"]
    return servers


def server(log: Mapping[str, Any]) -> Server:
    """Return the server of a log, without checks of the rest of its recipe."""
    recipe = {
        "recipe": 1,
        "name": "server",
        "model": {"id": log["model"]},
        "mesh": {"accelerator": "v5p-8", "axes": {"fsdp": 2, "tp": 2}},
        "data": {"train": ["gs://bucket/train.jsonl"]},
        "serve": log["serve"],
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(json.dumps(recipe), encoding="utf-8")
        loaded = load(path)
    assert loaded.recipe is not None, loaded.diagnostics
    facts, _ = gather(loaded.recipe, path)
    assert facts.model is not None and facts.accelerator is not None
    return server_of(
        Program(
            recipe=facts.recipe,
            source=facts.source,
            family=facts.model.family,
            architecture=facts.model.architecture,
            config=facts.model.config,
            model_origin=facts.model.origin,
            accelerator=facts.accelerator,
            serve_accelerator=facts.serve_accelerator,
            data_parallel=1,
            accumulation_steps=1,
            parameters=facts.defaults,
            lora=None,
            adapters=(),
            rules=(),
            text="",
        )
    )


def figures() -> Iterator[Figure]:
    """Yield every published figure."""
    for name, log in logs().items():
        planned = server(log)
        if (size := log.get("weights_gib")) is not None:
            held = sum(weight.bytes for weight in planned.weights) * planned.tensor_parallel / GIB
            yield Figure(name, "weights", size, held)
        if (tokens := log.get("cache_tokens")) is not None:
            yield Figure(name, "tokens", tokens, planned.limits.tokens_fit)
        for point in log.get("points", ()):
            prompt, answer, sequences = key = (point["input"], point["output"], point["concurrency"])
            if (time := point.get("ttft_ms")) is not None:
                batched = planned.program.recipe.server.max_num_batched_tokens
                first = planned.prefill(prompt, batched).estimate_seconds
                yield Figure(name, "TTFT", time, first * 1e3, key)
            step = planned.decode(sequences, prompt + answer / 2).estimate_seconds
            yield Figure(name, "TPOT", point["tpot_ms"], step * 1e3, key)


def tables(found: Sequence[Figure]) -> str:
    """Return the figures as two tables in Markdown, of memory and of times."""
    lines = [
        "|server|vLLM|weights, GiB|here|error, %|tokens of cache|here|error, %|",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in logs():
        held = {figure.what: figure for figure in found if figure.server == name and not figure.load}
        if held:
            cells = [*_cells(held.get("weights"), ".2f"), *_cells(held.get("tokens"), ",.0f")]
            lines.append(_row(_link(name), logs()[name]["vllm"], *cells))
    lines += [
        "",
        "|server|tokens in, out|requests at once|TTFT, ms|here|error, %|TPOT, ms|here|error, %|",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in logs():
        timed = [figure for figure in found if figure.server == name and figure.load]
        for key in dict.fromkeys(figure.load for figure in timed):
            at = {figure.what: figure for figure in timed if figure.load == key}
            cells = [*_cells(at.get("TTFT"), ".1f"), *_cells(at.get("TPOT"), ".1f")]
            lines.append(_row(_link(name), f"{key[0]:,}, {key[1]:,}", str(key[2]), *cells))
    return "\n".join([*lines, "", _summary(found)])


def _row(*cells: str) -> str:
    return f"|{'|'.join(cells)}|"


def _link(name: str) -> str:
    log = logs()[name]
    return f"[{log['name']}](https://{log['source'].partition(' ')[0]})"


def _cells(figure: Figure | None, form: str) -> list[str]:
    if figure is None:
        return ["", "", ""]
    return [format(figure.published, form), format(figure.estimate, form), f"{100 * figure.error:+.1f}"]


def _summary(found: Sequence[Figure]) -> str:
    parts = []
    for what in ("weights", "tokens", "TTFT", "TPOT"):
        errors = [abs(figure.error) for figure in found if figure.what == what]
        parts.append(f"{what} {100 * median(errors):.1f} % and {100 * max(errors):.1f} %")
    return f"Median and worst error: {', '.join(parts)}."


def main() -> int:
    before, _, after = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(
        f"{before}{BEGIN}{tables(list(figures()))}\n{END}{after.partition(END)[2]}", encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
