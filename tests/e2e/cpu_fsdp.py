"""Run a script with accelerate's FSDP on CPU processes, which accelerate itself supports only on GPUs.

torchrun --nproc_per_node 2 cpu_fsdp.py SCRIPT ARGUMENT...
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from accelerate.state import AcceleratorState, DistributedType
from torch import distributed

begin = AcceleratorState.__init__


def on_cpu(self: Any, *arguments: Any, fsdp_plugin: Any = None, **options: Any) -> None:
    begin(self, *arguments, fsdp_plugin=fsdp_plugin, **options)
    if fsdp_plugin is not None:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin


AcceleratorState.__init__ = on_cpu
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    assert not distributed.is_initialized(), "the script ends within its process group"
