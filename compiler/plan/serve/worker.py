"""Compile tpu-inference's serving step for a TPU that this machine does not have.

compile.py runs this file as a script, with the interpreter of the serving environment (environment.py). It
imports nothing of this project, which is not installed there. It reads a job (job.ServeJob) as JSON from
standard input, and prints a job.ServeAnswer as one line of JSON to standard output. The line lacks the fields
that compile.py reads from the compiled programs. Their texts are files in the folder that is the argument.

The model, its shardings, the attention kernels, the layout of the key/value cache and the compiler's options
are tpu-inference's own (model.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TOO_LARGE = ("RESOURCE_EXHAUSTED", "Ran out of memory")
"""Text in the compiler's error for a program that does not fit."""

KERNEL_BODY = re.compile(r'"body":"[^"]*"')
"""A kernel's own program inside an HLO text. It is most of the text, and it is not needed."""


def main() -> None:
    threading.Thread(target=_end_without, args=(os.getppid(),), daemon=True).start()
    # vLLM logs to standard output. Send its log to standard error, and only the answer to standard output.
    answer_to, sys.stdout = sys.stdout, sys.stderr
    answer = compile_job(json.loads(sys.stdin.read()), Path(sys.argv[1]))
    print(json.dumps(answer), file=answer_to, flush=True)


def _end_without(parent: int) -> None:
    """End this process when its parent process has ended for any reason."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def compile_job(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Compile a ServeJob, and return the answer. Both are plain values.

    Each program of the answer has the name of its text's file.
    """
    started = time.monotonic()
    step = _beside("model")
    mesh = step.mesh_of(job)
    step.patch(job)
    models = [step.ServingModel(job, layers, mesh, folder) for layers in job["layers"]]
    pages = job["pages"] or _most_pages(job, models)
    with ThreadPoolExecutor(2) as pool:
        # Compiling releases Python's lock, so that the next program is traced during a compile.
        compiling = [
            [pool.submit(_compiled, *model.step(bucket, pages)) for bucket in job["buckets"]]
            for model in models
        ]
        head = pool.submit(_compiled, *models[0].head())
        depths = [
            {
                "layers": model.layers,
                "weights": model.weight_bytes,
                "page": model.page_bytes,
                "programs": [future.result() for future in futures],
            }
            for model, futures in zip(models, compiling, strict=True)
        ]
        return {
            "page_tokens": models[0].page_tokens,
            "pages": pages,
            "token_bytes": models[-1].token_bytes,
            "depths": depths,
            "head": head.result(),
            "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "seconds": time.monotonic() - started,
        }


def _beside(name: str) -> Any:
    """Import a module of this folder by its file.

    The folder is not on sys.path, because other packages would import modules of these names from it.
    """
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _most_pages(job: dict[str, Any], models: list[Any]) -> int:
    """Return the number of pages that vLLM would allocate in addition to the whole model's weights."""

    def whole(figures: list[float]) -> float:
        slope = (figures[-1] - figures[0]) / max(1, models[-1].layers - models[0].layers)
        return figures[0] + slope * (job["model_layers"] - models[0].layers)

    room = job["hbm_bytes"] * job["memory_share"] - whole([model.weight_bytes for model in models])
    # vLLM keeps one page for itself.
    return max(1, int(room // whole([model.page_bytes for model in models])) - 1)


def _compiled(lowered: Any, kind: str, tokens: int, file: Path, started: float) -> dict[str, Any]:
    """Compile a program, write its text to `file`, and return its figures.

    If the program does not fit the memory, return the compiler's message as `refusal`.
    """
    import jax

    program: dict[str, Any] = {"kind": kind, "tokens": tokens}
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if not any(sign in str(error) for sign in TOO_LARGE):
            raise
        return program | {"refusal": str(error), "seconds": time.monotonic() - started}
    memory = compiled.memory_analysis()
    file.write_text(KERNEL_BODY.sub('"body":""', compiled.as_text()))
    return program | {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "text": file.name,
        "seconds": time.monotonic() - started,
    }


if __name__ == "__main__":
    main()
