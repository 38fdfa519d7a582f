"""Check the `launch` section: which launchers can create the machines, and whether checkpoints outlive
them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recipec.compiler.lowering.facts import Facts
from recipec.compiler.lowering.launching import launchers, obstacle
from recipec.compiler.wording import listing, plural
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic

READ_BY = {
    "queued": ("tpu-vm", "skypilot"),
    "queue_for": ("tpu-vm",),
    "runtime_version": ("tpu-vm", "skypilot"),
    "network": ("tpu-vm",),
    "subnetwork": ("tpu-vm",),
    "service_account": ("tpu-vm", "gke"),
    "cluster": ("xpk",),
    "image": ("gke", "xpk"),
    "bucket": ("gke",),
}
"""The launchers that a key applies to, if not to all."""


E1302 = Code(
    "E1302",
    "launcher that does not fit",
    cause="launch.kind names a launcher that cannot create these machines, or that would restart a "
    "run on a machine without its checkpoints.",
    cure="Do what the help says, or leave launch.kind out to get every launcher that fits.",
)

E1304 = Code(
    "E1304",
    "spot capacity with a reservation",
    cause="Capacity is either reserved or spot. Google Cloud refuses a request for both.",
    cure="Keep one of the two.",
)


def check(facts: Facts) -> Iterator[Diagnostic]:
    yield from _checkpoints(facts)
    launch, accelerator = facts.recipe.launch, facts.accelerator
    if accelerator is None:
        return
    named = "kind" in launch.model_fields_set
    for index, kind in enumerate(launch.kind if named else ()):
        hindrance = obstacle(kind, facts.recipe, accelerator)
        if hindrance is not None:
            yield Diagnostic(E1302, f"{kind}: {hindrance.reason}", f"launch.kind[{index}]", hindrance.cure)
    if launch.spot and launch.reservation is not None:
        yield Diagnostic(
            E1304,
            "`spot` asks for unreserved capacity, and `reservation` names reserved capacity",
            "launch.reservation",
            "remove the line, or write spot: false",
            at_key=True,
        )
    yield from _unread(facts, launch.kind if named else launchers(facts.recipe, accelerator))


E1301 = Code(
    "E1301",
    "checkpoints on separate host disks",
    cause="Several hosts write a checkpoint together, each its own part. checkpoint.directory is a "
    "folder on their own disks, so no host would have a complete checkpoint.",
    cure="Use a gs:// address, which all hosts can reach.",
)

W1303 = Code(
    "W1303",
    "checkpoints on the disk of a spot VM",
    cause="When Google Cloud takes a spot VM away, its disk is lost. A run with its checkpoints there "
    "starts over.",
    cure="Use a gs:// address in checkpoint.directory.",
)


def _checkpoints(facts: Facts) -> Iterator[Diagnostic]:
    accelerator, directory = facts.accelerator, facts.recipe.checkpoint.directory
    if accelerator is None or accelerator.platform != "tpu" or "://" in directory:
        return
    place = facts.first_given("checkpoint.directory", "mesh.hosts", "mesh.axes")
    cure = "checkpoint: {directory: gs://bucket/run}"
    if accelerator.hosts > 1:
        yield Diagnostic(
            E1301,
            f"`{directory}` is a separate folder on each of the {plural(accelerator.hosts, 'host')}, so no "
            "host would have a complete checkpoint",
            place,
            cure,
        )
    elif facts.recipe.launch.spot:
        yield Diagnostic(
            W1303,
            f"if Google Cloud takes the spot VM away, its disk and the checkpoints in `{directory}` are lost",
            facts.first_given("checkpoint.directory", "launch.spot"),
            cure,
        )


N1305 = Code(
    "N1305",
    "launch key without effect",
    cause="None of the recipe's launchers reads this key of the launch section.",
    cure="Nothing, or remove the key.",
)


def _unread(facts: Facts, kinds: Sequence[str]) -> Iterator[Diagnostic]:
    """Report keys that the recipe sets and that none of its launchers reads."""
    launch = facts.recipe.launch
    for key in sorted(launch.model_fields_set):
        readers = READ_BY.get(key)
        if not getattr(launch, key) or (readers is None and (kinds or key == "kind")):
            continue
        if readers is None or not set(readers) & set(kinds):
            names = listing(readers, "or") if readers else "any launcher"
            yield Diagnostic(
                N1305,
                f"launch.{key} has no effect: it is for {names}, which this recipe does not use",
                f"launch.{key}",
                "remove the line",
                at_key=True,
            )
    if launch.queue_for and "tpu-vm" in kinds and not launch.queued and "dcn" not in facts.axes:
        yield Diagnostic(
            N1305,
            "launch.queue_for has no effect without a queued resource",
            "launch.queue_for",
            "queued: true",
        )
