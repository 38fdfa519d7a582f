"""The command line of the other backends' scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..model.adapters import LoraSettings
from ..peft.adapter import located
from ..training.script_arguments import Arguments, parser_of


@dataclass(frozen=True)
class BackendArguments(Arguments):
    """The command line of a backend's script.

    Attributes:
        adapter: folder of a PEFT adapter to start from; None for the recipe's initial values.
        vllm_mode: how TRL generates completions with vLLM, colocate or server; None for transformers.
    """

    adapter: Path | None
    vllm_mode: str | None = None

    def start_from(self, lora: LoraSettings) -> Path | str | None:
        """Return the adapter to start from: --adapter, or the recipe's; None for fresh values."""
        if self.adapter is not None or lora.start_from is None:
            return self.adapter
        return located(lora.start_from, self.data_dir)


def parse_arguments(
    program: str, artifact: Path, argv: Sequence[str] | None = None, generates: bool = False
) -> BackendArguments:
    """Read the command line of a backend's script; None for `argv` takes sys.argv's arguments.

    Args:
        generates: whether the run generates completions, which TRL does with vLLM too.
    """
    parser = parser_of(program, artifact)
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="start from a PEFT adapter")
    if generates:
        parser.add_argument(
            "--vllm-mode",
            choices=("colocate", "server"),
            help="generate with TRL's vLLM: on the GPUs that train, or by `trl vllm-serve`",
        )
    options = parser.parse_args(argv)
    if options.resume and options.adapter is not None:
        parser.error("--resume continues a run and --adapter starts one: give only one of them")
    return BackendArguments(**vars(options))
