"""Run a generated probe.py: ten minutes on the recipe's machine, without data or weights.

The recipe's values are those of the train.py next to it. probe_models.json has the shapes: a miniature of the
model, and the model with a few of its layers.
"""

from __future__ import annotations

import argparse
import functools
import json
import runpy
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from ..addresses import folder
from ..build_check import demand_whole
from ..errors import UserError, guarded, say
from ..model.adapters import LoraSettings, lora_settings
from ..model.random_weights import write_text_model
from ..model.sharding import start_mesh
from ..settings import RunSettings
from ..training.ending import attended, out_of_memory
from ..training.session import quiet
from ..weights.checkpoint import HFCheckpoint
from .compare_numbers import TOLERANCES, Outcome, compare, meshes, outcome, reference_mesh
from .machine import SLOW, machine, slow, versions
from .merged import merged
from .probe_results import LOCK, Report, digest_of, gib, on_disk, table
from .served import hold, keep
from .timing import Depth, summary, timed
from .variants import VARIANTS, probed_before

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from ..hosts.group import ProcessGroup
    from ..hosts.single import SingleProcess

FILE = "probe.json"
SHAPES = "probe_models.json"
PACKAGES = ("jax", "jaxlib", "libtpu", "google-tunix", "qwix", "flax", "optax")
"""Packages whose versions are reported, also if they differ from the lock's."""
LEAST_HBM = 0.98
"""The smallest share of the catalog's HBM that JAX may report for a device."""
GONE = "stopped: nothing was written"


@dataclass(frozen=True)
class Probed:
    """The object of a probe.

    Attributes:
        shapes: probe_models.json.
        lock: recipe.lock.json.
        settings: train.py's settings.
        optimizer: makes train.py's optimizer from a schedule.
        merged: where to keep the merged miniature, or None.
        without: what of the recipe's step is left out, or "".
    """

    shapes: Mapping[str, Any]
    lock: Mapping[str, Any]
    settings: RunSettings
    optimizer: Callable[[Any], Any]
    merged: Path | None
    without: str = ""

    @classmethod
    def of(cls, artifact: Path, merged: Path | None) -> Probed:
        demand_whole(artifact)
        script = runpy.run_path(str(artifact / "train.py"), run_name="train")
        sections = (script[name] for name in ("MODEL", "MESH", "DATA", "TRAIN", "CHECKPOINT"))
        model, mesh, data, train, checkpoint = sections
        without = ""
        if train.distill is not None:
            without = "the distillation's teacher is left out: the step is that of sft, and takes less"
            train = replace(train, objective="sft", distill=None)
        rules = tuple(script.get("SHARDING_RULES", ()))
        lora = _drawn(script.get("LORA"))
        settings = RunSettings(model, mesh, lora, data, train, checkpoint, rules)
        shapes, lock = (json.loads((artifact / name).read_text(encoding="utf-8")) for name in (SHAPES, LOCK))
        return cls(shapes, lock, settings, script["optimizer"], merged, without)

    @property
    def miniature(self) -> RunSettings:
        """Return the run's settings with the miniature's LoRA."""
        section = self.shapes["miniature"]["lora"]
        layers = self.shapes["miniature"]["layers"]
        lora = None if section is None else lora_settings(section, layers)
        return replace(self.settings, lora=_drawn(lora))


def _drawn(lora: LoraSettings | None) -> LoraSettings | None:
    """Return settings for random weights: adapters that start from the base's weights are random too, and
    which rows of the embedding are trained does not matter."""
    if lora is None:
        return None
    tokens = tuple(range(len(lora.trainable_tokens)))
    return replace(lora, init="peft" if lora.principal else lora.init, trainable_tokens=tokens)


def main(artifact: Path, argv: Sequence[str] | None = None) -> int:
    """Run a generated probe.py.

    Returns:
        The exit status: 0, or 1 if a number is outside its tolerance or the machine is not the recipe's.
    """
    parser = argparse.ArgumentParser(
        prog="probe.py",
        description="Compares this machine with the recipe in ten minutes: devices, numbers, time, a merge. "
        "Needs no data and no weights.",
        allow_abbrev=False,
    )
    add = functools.partial(parser.add_argument, metavar="DIR", type=folder)
    add("--output", default=artifact, help="folder for probe.json")
    add("--merged", help="folder of the merged miniature, for a server of it")
    add(
        "--server",
        metavar="URL",
        type=str,
        help="measure only this server, which serves --merged or any other model",
    )
    tried = ", ".join(f"{name} ({variant.about})" for name, variant in VARIANTS.items())
    add(
        "--try",
        dest="variant",
        metavar="NAME",
        type=str,
        choices=VARIANTS,
        help=f"time only a variant of the step, and add it to probe.json: {tried}",
    )
    options = parser.parse_args(argv)
    if options.variant and (options.server or options.merged):
        parser.error("--try measures only the step: leave out --server and --merged")
    output: Path = options.output
    if not output.is_dir():
        parser.error(f"--output: there is no folder {output}")

    @on_disk()
    def probe() -> int:
        if options.server:
            ask = functools.partial(hold, artifact, output / FILE, options.server, options.merged)
            return attended(lambda signum: GONE, 1, lambda *_: ask())
        probed = Probed.of(artifact, options.merged)
        part = functools.partial(_try, options.variant) if options.variant else _probe
        work = on_disk()(functools.partial(part, probed, output))
        return attended(lambda signum: GONE, probed.settings.mesh.hosts, lambda _, hosts: work(hosts))

    return guarded(probe)


def _probe(probed: Probed, output: Path, hosts: SingleProcess | ProcessGroup) -> int:
    quiet()
    report = Report()
    mesh = start_mesh(probed.settings.mesh, hosts.count)
    if probed.without:
        report.notes.append(probed.without)
    _machine(report, probed, output)
    _devices(report)
    with tempfile.TemporaryDirectory() as work:
        miniature = _numbers(report, probed, mesh, Path(work))
        _time(report, probed, mesh)
        if hosts.count > 1:
            report.notes.append("no logits and no merge: they need a run on one host")
        elif miniature is not None:
            _merge(report, probed, mesh, miniature, Path(work))
    if not hosts.first:
        return 1 if report.problems else 0
    print(table(report.rows))
    for note in report.notes:
        print(f"note: {note}")
    for problem in report.problems:
        print(f"error: {problem}", file=sys.stderr)
    report.write(output / FILE)
    say(f"{output / FILE}: written")
    return 1 if report.problems else 0


def _try(name: str, probed: Probed, output: Path, hosts: SingleProcess | ProcessGroup) -> int:
    """Time a variant of the step, and add it to the probe.json of the unchanged step."""
    quiet()
    changed = replace(probed, settings=VARIANTS[name].of(probed.settings))
    if changed.settings == probed.settings:
        raise UserError(f"the recipe's step is {name} already", "probe.py --help lists the other variants")
    before = probed_before(output / FILE, digest_of(probed.lock)) if hosts.first else {}
    report = Report()
    _time(report, changed, start_mesh(changed.settings.mesh, hosts.count))
    if "step_seconds" not in report.data.get("time", {}):
        raise UserError(f"the step of {name} was not timed", "its message is above")
    if hosts.first:
        old, new = before["time"]["step_seconds"], report.data["time"]["step_seconds"]
        print(table([*report.rows, ("relative to the unchanged step", "1.000", f"{new / old:.3f}")]))
        before.setdefault("tried", {})[name] = report.data["time"]
        (output / FILE).write_text(json.dumps(before, indent=1) + "\n", encoding="utf-8")
        say(f"{output / FILE}: written")
    return 0


def _machine(report: Report, probed: Probed, output: Path) -> None:
    planned, described = probed.shapes["machine"], machine(output)
    report.data |= {
        "date": datetime.now(UTC).date().isoformat(),
        "recipe": digest_of(probed.lock),
        "setting": _setting(probed),
        "machine": described,
    }
    locked, there = probed.lock["packages"]["train"], versions(probed.lock)
    report.data["versions"] = {name: there[name] for name in PACKAGES if there.get(name)}
    devices = (
        f"{planned['devices']} of {planned['accelerator']}",
        f"{described['devices']} {described['kind']}",
    )
    host = f"{gib(described['host_bytes'])}, {described['cores']}, {gib(described['disk_free_bytes'])}"
    report.rows += [
        ("devices", *devices),
        ("topology", planned["topology"] or "-", described["topology"] or "not told"),
        ("HBM of a device", gib(planned["hbm_bytes"]), gib(described["hbm_bytes"])),
        ("memory, cores, free disk", "-", host),
        ("flags of libtpu", str(len(probed.settings.mesh.flags)), str(len(described["flags"]))),
    ]
    if (
        planned["topology"]
        and described["topology"]
        and _shape(planned["topology"]) != _shape(described["topology"])
    ):
        laid = f"the chips are laid out as {described['topology']}"
        report.notes.append(f"{laid}, the recipe's as {planned['topology']}")
    counted, told = planned["hbm_bytes"], described["hbm_bytes"]
    if counted and told and told < LEAST_HBM * counted:
        report.problems.append(f"a device has {gib(told)} of HBM, but the plan assumes {gib(counted)}")
    other = {name: there[name] for name in locked if there[name] != locked[name]}
    report.rows.append(("packages as locked", str(len(locked)), str(len(locked) - len(other))))
    for name in (name for name in PACKAGES if name in other):
        report.notes.append(f"{name} is {other[name] or 'not installed'}, the lock has {locked[name]}")


def _devices(report: Report) -> None:
    if report.data["machine"]["platform"] == "cpu":
        return  # they share the machine's cores
    with report.part("a product on each device alone") as begun:
        if begun:
            product = report.data["product"] = slow()
            row = "the slowest device relative to the median", f"{SLOW} times"
            report.rows.append((*row, f"{product['slowest']} times {1e3 * product['median_seconds']:.2f} ms"))
            report.notes += product["slow"]


def _numbers(report: Report, probed: Probed, mesh: Mesh, work: Path) -> tuple[Any, Outcome] | None:
    """Compare the miniature on all meshes; return its checkpoint and its numbers."""
    shape, settings = probed.shapes["miniature"], probed.miniature
    (work / "model").mkdir()
    write_text_model(work / "model", shape["config"])
    base = HFCheckpoint.open(work / "model")
    kept: Outcome | None = None
    with report.part("numbers on one CPU device") as begun:
        if not begun:
            return None
        reference = outcome(base, settings, probed.optimizer, reference_mesh(mesh.shape), "float32", True)
    entries = report.data.setdefault("numbers", [])
    for where, other in meshes(dict(mesh.shape), mesh, shape["heads"]):
        for dtype in TOLERANCES:
            with report.part(f"numbers on {where} in {dtype}") as begun:
                if not begun:
                    continue
                result = outcome(base, settings, probed.optimizer, other, dtype, other is mesh)
                compared = compare(where, dtype, result, reference)
                entries.append({"where": where, "dtype": dtype, **compared.differences})
                report.problems += [compared.problem] if compared.problem else []
                allowed = TOLERANCES[dtype]
                report.rows += [
                    (f"{name}, {dtype}, {where}", f"{allowed[name]:.0e}", f"{value:.1e}")
                    for name, value in compared.differences.items()
                ]
            kept = result if kept is None else kept
    return None if kept is None else (base, kept)


def _time(report: Report, probed: Probed, mesh: Mesh) -> None:
    depths: list[Depth] = []
    if probed.settings.model.dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")  # as in a run of train.py
    for shape in probed.shapes["depths"]:
        config, layers = shape["config"], shape["layers"]
        with report.part(f"time of {len(layers)} layers") as begun, out_of_memory():
            if begun:
                patches = probed.shapes.get("patches", 0)
                depths.append(timed(config, layers, probed.settings, probed.optimizer, mesh, patches))
    if not depths:
        return
    report.rows += [
        (f"seconds of a micro-batch, {depth.layers} layers", "-", f"{depth.seconds:.4f}") for depth in depths
    ]
    if len(depths) < len(probed.shapes["depths"]):
        report.data["time"] = {"depths": [vars(depth) for depth in depths]}
        return
    timing = summary(depths, probed.settings, probed.shapes["layers"])
    report.data["time"] = timing
    if "layer_seconds" in timing:
        report.rows.append(("seconds of a layer", "-", f"{timing['layer_seconds']:.5f}"))
        report.rows.append(("seconds outside the layers", "-", f"{timing['outside_seconds']:.4f}"))
    there = gib(probed.shapes["machine"]["hbm_bytes"])
    report.rows += [
        (f"seconds of a step, {timing['layers']} layers", "recipe plan", f"{timing['step_seconds']:.3f}"),
        ("HBM, by the compiler", there, gib(timing["compiled_bytes"])),
        ("peak HBM", there, gib(timing["peak_bytes"])),
    ]
    report.rows += [
        (f"seconds of a micro-batch: {part}", "recipe plan", f"{taken:.4f}")
        for part, taken in timing["parts"].items()
    ]
    if not timing["parts"]:
        report.notes.append("no parts of the step's time: its trace could not be made or read")


def _merge(report: Report, probed: Probed, mesh: Mesh, miniature: tuple[Any, Outcome], work: Path) -> None:
    base, trained = miniature
    with report.part("the merge of the miniature") as begun:
        if not begun:
            return
        if probed.miniature.lora is None:
            report.notes.append("no merge: all weights are trained, and replace the base's")
            return
        folder = probed.merged or work / "merged"
        try:
            differences = report.data["merge"] = merged(
                base, trained, probed.miniature, probed.lock, mesh, folder
            )
        except UserError as error:
            report.problems.append(error.message)
            return
        if probed.merged:
            keep(folder, probed.settings.model, digest_of(probed.lock))
        if probed.lock["recipe"]["serve"]:
            how = "--merged DIR keeps the miniature for serve.sh DIR, --server URL asks that server"
            report.rows.append(("the server", "-", f"not tried: {how}"))
        report.rows.append(
            (
                "merged logits against trained",
                f"{differences['logits_allowed']:.0e}",
                f"{differences['logits']:.1e}",
            )
        )


def _setting(probed: Probed) -> dict[str, Any]:
    """Return the configuration of the run, without names or paths."""
    run, shapes = probed.settings, probed.shapes
    return {
        "accelerator": shapes["machine"]["accelerator"],
        "axes": dict(run.mesh.axes),
        "family": run.model.family,
        "model": shapes["sizes"],
        "dtype": run.model.dtype,
        "quantization": run.model.quantization,
        "attention": run.model.attention,
        "remat": run.model.remat,
        "objective": run.train.objective,
        "rows": run.train.micro_batch_size * run.mesh.data_parallel,
        "length": run.data.max_length,
        "lora": run.lora and {"rank": run.lora.rank, "init": run.lora.init},
    }


def _shape(topology: str) -> list[int]:
    """Return the extents of a topology in any order, without extents of one chip."""
    return sorted(int(size) for size in topology.split("x") if size != "1")
