"""Variants of a recipe's step: changes whose effect only a run on the machine shows.

libtpu's schedule has no cycles of attention's kernel, and hides what transfers to the host's memory take from
the step. MaxText's published runs on v6e use larger attention blocks, activations in the host's memory and
more flags than a recipe has by default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..settings import RunSettings
from .probe_results import FIRST

HOST_OFFLOAD = {
    "xla_tpu_enable_all_experimental_scheduler_features": "true",
    "xla_tpu_enable_scheduler_memory_pressure_tracking": "true",
    "xla_tpu_host_transfer_overlap_limit": "24",
    "xla_tpu_aggressive_opt_barrier_removal": "ENABLED",
    "xla_lhs_prioritize_async_depth_over_stall": "ENABLED",
    "xla_tpu_enable_ag_backward_pipelining": "true",
    "xla_should_allow_loop_variant_parameter_in_chain": "ENABLED",
    "xla_should_add_loop_invariant_op_in_chain": "ENABLED",
    "xla_max_concurrent_host_send_recv": "100",
    "xla_tpu_scheduler_percent_shared_memory_limit": "100",
    "xla_latency_hiding_scheduler_rerun": "2",
}
"""Flags of MaxText's runs whose activations wait in the host's memory."""

SPARSE_CORES = {
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "false",
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true",
    "xla_tpu_enable_all_reduce_offload_tracing": "true",
    "xla_tpu_use_tc_device_shape_on_sc": "true",
    "xla_sc_enable_instruction_fusion": "false",
    "xla_sc_disjoint_spmem": "false",
    "xla_sc_disable_megacore_partitioning": "true",
}
"""Flags of MaxText's runs on v6e that give all-reduces to the SparseCores."""


@dataclass(frozen=True)
class Variant:
    """A change of a recipe's step.

    Attributes:
        about: what changes, for --help.
        model: fields of ModelSettings with other values.
        flags: flags of libtpu to add, by name.
        keep_flags: whether the recipe's own flags stay.
    """

    about: str
    model: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    keep_flags: bool = True

    def of(self, settings: RunSettings) -> RunSettings:
        """Return the settings with the change; unchanged settings if they already have it."""
        before = settings.mesh.flags if self.keep_flags else ()
        kept = [flag for flag in before if _name(flag) not in self.flags]
        added = [f"--{name}={value}" for name, value in self.flags.items()]
        return replace(
            settings,
            model=replace(settings.model, **self.model),
            mesh=replace(settings.mesh, flags=(*kept, *added)),
        )


VARIANTS = {
    **{
        f"attention-{block}": Variant(
            f"splash attention in blocks of {block} tokens", {"attention": "splash", "attention_block": block}
        )
        for block in (512, 1024, 2048)
    },
    "keep-all": Variant("no recomputation", {"remat": "none"}),
    "save-dots": Variant("keep the results of projections and attention", {"remat": "save_dots"}),
    "offload": Variant(
        "send the results of projections and attention to the host's memory",
        {"remat": "offload_dots"},
        HOST_OFFLOAD,
    ),
    "sparse-cores": Variant("all-reduces on the SparseCores", flags=SPARSE_CORES),
    "no-flags": Variant("no flags of libtpu", keep_flags=False),
}
"""What --try accepts."""


def probed_before(file: Path, digest: str) -> dict[str, Any]:
    """Read the probe.json of the unchanged step.

    Args:
        digest: digest of the recipe.

    Raises:
        UserError: the file is not there, is of another recipe, or has no time of the step.
    """
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no {file} to compare with", FIRST) from None
    if not isinstance(before, dict) or before.get("recipe") != digest:
        raise UserError(f"{file} is of another recipe", FIRST)
    if "step_seconds" not in before.get("time", {}):
        raise UserError(f"{file} has no time of the unchanged step", FIRST)
    return before


def _name(flag: str) -> str:
    return flag.removeprefix("--").partition("=")[0]
