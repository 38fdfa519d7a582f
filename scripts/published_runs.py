"""Compile the published, measured steps of docs/published_runs.json again, without a TPU.

    PYTHON scripts/published_runs.py list
    PYTHON scripts/published_runs.py compile ROW OUT

PYTHON is the interpreter of an environment with MaxText, whose steps were measured. MaxText needs other
versions of JAX than this project. Either `maxtext[tpu]` is installed, or a checkout of the measured commit is
in PYTHONPATH. Only the JAX and libtpu of the run (`measured_with` of the table; JAX 0.6.1 goes with libtpu
0.0.15) accept all its flags. The script writes two files to OUT: scheduled.txt is the scheduled module of the
step, and facts.json holds the published run, the compiling versions, and its mesh, memory and compile time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

TABLE = Path(__file__).parents[1] / "docs" / "published_runs.json"
MODULES = ("maxtext.trainers.pre_train.train_compile", "MaxText.train_compile")
"""The module with which MaxText compiles its step: since 0.2, and before."""
PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax")
ALWAYS = {
    "compile_topology_num_slices": 1,
    "skip_jax_distributed_system": True,
    "enable_checkpointing": False,
    "dataset_type": "synthetic",
    "log_config": False,
}
MEMORY = ("argument", "output", "alias", "temp", "generated_code")
"""Sizes of a compiled program on one device, in bytes, as JAX names them."""


def taken(table: dict[str, Any], row: str) -> tuple[list[str], dict[str, str]]:
    """Return the flags of a row that its libtpu takes, and the others with the reason."""
    dropped: dict[str, str] = table["dropped"].get(metadata.version("libtpu"), {})
    flags = [flag for name in table["runs"][row]["flags"] for flag in table["flags"].get(name, [name])]
    chip = row.partition("-")[0]
    refused = {flag: why for flag in flags if (why := dropped.get(flag) or dropped.get(f"{chip} {flag}"))}
    return [flag for flag in flags if flag not in refused], refused


def settings(run: dict[str, Any]) -> list[str]:
    """Return the settings of a run as MaxText's command line takes them."""
    return [f"{key}={value}" for key, value in (ALWAYS | run["settings"]).items()]


def compiled(row: str, out: Path) -> None:
    """Compile one row of the table and write its scheduled module and facts to a folder.

    Raises:
        KeyError: the table has no such row.
        jax.errors.JaxRuntimeError: libtpu refuses the program, for example for memory.
    """
    table = json.loads(TABLE.read_text())
    run = table["runs"][row]
    flags, dropped = taken(table, row)
    os.environ |= {
        "LIBTPU_INIT_ARGS": " ".join(flags),
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
    }
    import jax  # only now: libtpu reads its flags when it is loaded

    train_compile: Any = import_module(next(name for name in MODULES if find_spec(name.partition(".")[0])))
    out.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {"row": row} | run | {"flags": flags, "dropped": dropped}
    facts |= {
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "module": train_compile.__name__,
    }
    jitted = train_compile.jit_and_compile

    def kept(*args: Any) -> NoReturn:
        began = time.monotonic()
        program = jitted(*args)
        (out / "scheduled.txt").write_text(program.as_text())
        mesh = next(value for value in args if isinstance(value, jax.sharding.Mesh))
        memory = program.memory_analysis()
        facts.update(
            compile_s=round(time.monotonic() - began, 1),
            mesh=dict(mesh.shape),
            devices=[device.id for device in mesh.devices.flat],
            coordinates=[list(device.coords) for device in mesh.devices.flat],
            memory={name: getattr(memory, f"{name}_size_in_bytes") for name in MEMORY},
        )
        (out / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
        sys.exit()  # MaxText continues with the cost analysis, for which a libtpu may need files of the chip

    train_compile.jit_and_compile = kept
    package = sys.modules[train_compile.__name__.partition(".")[0]]
    base = Path(next(iter(package.__path__))) / "configs" / "base.yml"
    train_compile.main(["train_compile", str(base), *settings(run)])


def main() -> None:
    """List the rows, or compile one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list")
    compile_parser = commands.add_parser("compile")
    compile_parser.add_argument("row")
    compile_parser.add_argument("out", type=Path)
    args = parser.parse_args()
    if args.command == "list":
        sys.stdout.writelines(f"{row}\n" for row in json.loads(TABLE.read_text())["runs"])
    else:
        compiled(args.row, args.out)


if __name__ == "__main__":
    main()
