"""What a generated probe.py runs: ten minutes on the recipe's machine, without data or weights.

The recipe's values are those of the train.py beside it; probe_models.json has the shapes: a miniature of the
model, and the model with some of its layers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..addresses import folder
from ..errors import UserError, guarded, say
from ..hosts import SINGLE, SingleProcess, alone
from ..interrupts import Interrupted, Interrupts
from ..model.adapters import LoraSettings, lora_settings
from ..settings import RunSettings

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from ..hosts.group import ProcessGroup
    from .numbers import Outcome

VERSION = 1
FILE = "probe.json"
SHAPES = "probe_models.json"
LOCK = "recipe.lock.json"
SECONDS = 600
"""After so many nothing more is begun."""
PACKAGES = ("jax", "jaxlib", "libtpu", "google-tunix", "qwix", "flax", "optax")
"""Those whose versions are told, whether or not they are the lock's."""
LEAST_HBM = 0.98
"""The share of a device's HBM that JAX may tell less than the catalogue has."""
GONE = "stopped: nothing was written"


@dataclass
class Report:
    """What was found, as probe.json holds it.

    Attributes:
        rows: of the table: what, planned, found.
        notes: what is otherwise than planned, and no number.
        problems: a sentence for each mesh, device or merge whose numbers are outside their tolerance.
    """

    data: dict[str, Any] = field(default_factory=dict)
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)

    @contextmanager
    def part(self, name: str) -> Iterator[bool]:
        """A part of the probe, which is left out when the time is over; yields whether it is begun."""
        start = time.monotonic()
        begin = start - self.begun < SECONDS
        if begin:
            say(f"probe: {name}")
        else:
            self.notes.append(f"left out, for {SECONDS // 60} minutes are over: {name}")
        yield begin
        if begin:
            self.data.setdefault("seconds", {})[name] = round(time.monotonic() - start, 1)

    def write(self, path: Path) -> None:
        told = {"probe": VERSION, **self.data, "notes": self.notes, "problems": self.problems}
        path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Probed:
    """What is probed.

    Attributes:
        artifact: folder of the script.
        shapes: probe_models.json.
        lock: recipe.lock.json.
        settings: of train.py.
        optimizer: train.py's, from a schedule.
    """

    artifact: Path
    shapes: Mapping[str, Any]
    lock: Mapping[str, Any]
    settings: RunSettings
    optimizer: Callable[[Any], Any]

    @classmethod
    def of(cls, artifact: Path) -> Probed:
        script = runpy.run_path(str(artifact / "train.py"), run_name="train")
        sections = (script[name] for name in ("MODEL", "MESH", "DATA", "TRAIN", "CHECKPOINT"))
        model, mesh, data, train, checkpoint = sections
        rules = tuple(script.get("SHARDING_RULES", ()))
        lora = _drawn(script.get("LORA"))
        settings = RunSettings(model, mesh, lora, data, train, checkpoint, rules)
        shapes, lock = (json.loads((artifact / name).read_text(encoding="utf-8")) for name in (SHAPES, LOCK))
        return cls(artifact, shapes, lock, settings, script["optimizer"])

    @property
    def miniature(self) -> RunSettings:
        """The run's settings with the miniature's LoRA."""
        section = self.shapes["miniature"]["lora"]
        layers = self.shapes["miniature"]["layers"]
        lora = None if section is None else lora_settings(section, layers)
        return replace(self.settings, lora=_drawn(lora))


def _drawn(lora: LoraSettings | None) -> LoraSettings | None:
    """Adapters that are drawn where a run's start from the base's weights: a probe's base is drawn, too."""
    return lora if lora is None or not lora.principal else replace(lora, init="peft")


def main(artifact: Path, argv: Sequence[str] | None = None) -> int:
    """Runs a generated probe.py.

    Returns:
        The exit status: 0, 1 when a number is outside its tolerance or the machine is not the recipe's.
    """
    parser = argparse.ArgumentParser(
        prog="probe.py",
        description="Holds this machine against the recipe in ten minutes: devices, numbers, time, a merge. "
        "Needs neither data nor weights.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--output", type=folder, metavar="DIR", default=artifact, help="where probe.json is written"
    )
    output: Path = parser.parse_args(argv).output
    with Interrupts(lambda signum: GONE) as interrupts:

        def joined() -> int:
            probed = Probed.of(artifact)
            if alone(probed.settings.mesh.hosts):
                return _probe(probed, output, SINGLE)
            from ..hosts.group import together

            return together(
                probed.settings.mesh.hosts, interrupts, lambda _, hosts: _probe(probed, output, hosts)
            )

        try:
            return guarded(joined)
        except Interrupted as interrupted:
            say(f"\n{GONE}")
            return 128 + interrupted.signum


def _probe(probed: Probed, output: Path, hosts: SingleProcess | ProcessGroup) -> int:
    from ..model import mesh as meshes
    from ..training.session import quiet

    quiet()
    report = Report()
    mesh = meshes.start(probed.settings.mesh, hosts.count)
    _machine(report, probed, output)
    with tempfile.TemporaryDirectory() as work:
        miniature = _numbers(report, probed, mesh, Path(work))
        _time(report, probed, mesh)
        if hosts.count > 1:
            report.notes.append("no logits and no merge: they are of a run on one host")
        elif miniature is not None:
            _merge(report, probed, mesh, miniature, Path(work))
    if not hosts.first:
        return 1 if report.problems else 0
    report.write(output / FILE)
    print(table(report.rows))
    for note in report.notes:
        print(f"note: {note}")
    for problem in report.problems:
        print(f"error: {problem}", file=sys.stderr)
    print(f"{output / FILE}: written", file=sys.stderr)
    return 1 if report.problems else 0


def _machine(report: Report, probed: Probed, output: Path) -> None:
    from .machine import machine, versions

    planned, found = probed.shapes["machine"], machine(output)
    report.data |= {
        "date": datetime.now(UTC).date().isoformat(),
        "recipe": _digest(probed.lock),
        "setting": _setting(probed),
        "machine": found,
    }
    locked, there = probed.lock["packages"]["train"], versions(probed.lock)
    report.data["versions"] = {name: there[name] for name in PACKAGES if there.get(name)}
    report.rows += [
        (
            "devices",
            f"{planned['devices']} of {planned['accelerator']}",
            f"{found['devices']} {found['kind']}",
        ),
        ("topology", planned["topology"] or "-", found["topology"] or "not told"),
        ("HBM of a device", gib(planned["hbm_bytes"]), gib(found["hbm_bytes"])),
        (
            "memory, cores, free disk",
            "-",
            f"{gib(found['host_bytes'])}, {found['cores']}, {gib(found['disk_free_bytes'])}",
        ),
        ("flags of libtpu", str(len(probed.settings.mesh.flags)), str(len(found["flags"]))),
    ]
    if planned["topology"] and found["topology"] and _shape(planned["topology"]) != _shape(found["topology"]):
        report.notes.append(
            f"the chips are laid out as {found['topology']}, the recipe's as {planned['topology']}"
        )
    counted, told = planned["hbm_bytes"], found["hbm_bytes"]
    if counted and told and told < LEAST_HBM * counted:
        report.problems.append(f"a device has {gib(told)} of HBM, and the plan counts on {gib(counted)}")
    other = {name: there[name] for name in locked if there[name] != locked[name]}
    report.rows.append(("packages as locked", str(len(locked)), str(len(locked) - len(other))))
    for name in (name for name in PACKAGES if name in other):
        report.notes.append(f"{name} is {other[name] or 'not installed'}, the lock has {locked[name]}")


def _numbers(report: Report, probed: Probed, mesh: Mesh, work: Path) -> tuple[Any, Outcome] | None:
    """Compares the miniature on all meshes; returns its checkpoint and its numbers."""
    from ..model.random_weights import write_text_model
    from ..weights.checkpoint import HFCheckpoint
    from .numbers import TOLERANCES, compare, meshes, outcome, reference_mesh

    shape, settings = probed.shapes["miniature"], probed.miniature
    (work / "model").mkdir()
    write_text_model(work / "model", shape["config"])
    base = HFCheckpoint.open(work / "model")
    kept: Outcome | None = None
    with report.part("numbers on one CPU device") as begun:
        if not begun:
            return None
        reference = outcome(base, settings, probed.optimizer, reference_mesh(mesh.shape), "float32", True)
    found = report.data.setdefault("numbers", [])
    for where, other in meshes(dict(mesh.shape), mesh, shape["heads"]):
        for dtype in TOLERANCES:
            with report.part(f"numbers on {where} in {dtype}") as begun:
                if not begun:
                    continue
                own = outcome(base, settings, probed.optimizer, other, dtype, other is mesh)
                compared = compare(where, dtype, own, reference)
                found.append({"where": where, "dtype": dtype, **compared.found})
                report.problems += [compared.problem] if compared.problem else []
                allowed = TOLERANCES[dtype]
                report.rows += [
                    (f"{name}, {dtype}, {where}", f"{allowed[name]:.0e}", f"{value:.1e}")
                    for name, value in compared.found.items()
                ]
            kept = own if kept is None else kept
    return None if kept is None else (base, kept)


def _time(report: Report, probed: Probed, mesh: Mesh) -> None:
    import jax

    from ..training.ending import out_of_memory
    from .timing import Depth, summary, timed

    depths: list[Depth] = []
    if probed.settings.model.dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")  # as a run of train.py
    for shape in probed.shapes["depths"]:
        with report.part(f"time of {len(shape['layers'])} layers") as begun, out_of_memory():
            if begun:
                depths.append(
                    timed(shape["config"], shape["layers"], probed.settings, probed.optimizer, mesh)
                )
    if not depths:
        return
    report.rows += [
        (f"seconds of a micro-batch, {depth.layers} layers", "-", f"{depth.seconds:.4f}") for depth in depths
    ]
    if len(depths) < len(probed.shapes["depths"]):
        report.data["time"] = {"depths": [vars(depth) for depth in depths]}
        return
    found = summary(depths, probed.settings, probed.shapes["layers"])
    report.data["time"] = found
    if "layer_seconds" in found:
        report.rows.append(("seconds of a layer", "-", f"{found['layer_seconds']:.5f}"))
        report.rows.append(("seconds outside the layers", "-", f"{found['outside_seconds']:.4f}"))
    report.rows += [
        (f"seconds of a step, {found['layers']} layers", "recipe plan", f"{found['step_seconds']:.3f}"),
        (
            "HBM of it, by the compiler",
            gib(probed.shapes["machine"]["hbm_bytes"]),
            gib(found["compiled_bytes"]),
        ),
        ("HBM of it at its peak", gib(probed.shapes["machine"]["hbm_bytes"]), gib(found["peak_bytes"])),
    ]


def _merge(report: Report, probed: Probed, mesh: Mesh, miniature: tuple[Any, Outcome], work: Path) -> None:
    from .merged import merged

    base, found = miniature
    with report.part("the merge of the miniature") as begun:
        if not begun:
            return
        if probed.miniature.lora is None:
            report.notes.append("no merge: all weights are trained, and take the base's place as they are")
            return
        try:
            made = merged(base, found, probed.miniature, probed.lock, mesh, work / "merged")
        except UserError as error:
            report.problems.append(error.message)
            return
        report.data["merge"] = made
        report.rows.append(
            ("merged logits against trained", f"{made['logits_allowed']:.0e}", f"{made['logits']:.1e}")
        )


def _setting(probed: Probed) -> dict[str, Any]:
    """What was run, without a name or a path."""
    run, shapes = probed.settings, probed.shapes
    return {
        "accelerator": shapes["machine"]["accelerator"],
        "axes": dict(run.mesh.axes),
        "family": run.model.family,
        "model": shapes["sizes"],
        "dtype": run.model.dtype,
        "attention": run.model.attention,
        "remat": run.model.remat,
        "objective": run.train.objective,
        "rows": run.train.micro_batch_size * run.mesh.data_parallel,
        "length": run.data.max_length,
        "lora": run.lora and {"rank": run.lora.rank, "init": run.lora.init, "quantize": run.lora.quantize},
    }


def _digest(lock: Mapping[str, Any]) -> str:
    """Of the resolved recipe: by it, and by nothing else, a probe is known to be of one."""
    return hashlib.sha256(json.dumps(lock["recipe"], sort_keys=True).encode()).hexdigest()


def _shape(topology: str) -> list[int]:
    """The extents of a topology, without those of one chip, whichever way round."""
    return sorted(int(size) for size in topology.split("x") if size != "1")


def gib(size: float | None) -> str:
    return "not told" if size is None else f"{size / 2**30:.2f} GiB"


def table(rows: Sequence[tuple[str, str, str]]) -> str:
    """Aligned columns: what, planned or allowed, found."""
    every = [("", "planned or allowed", "found"), *rows]
    widths = [max(len(row[column]) for row in every) for column in range(3)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in every
    )
