"""A fake of compiler.plan.worker that runs no compiler.

FAKE_WORKER_TOLD, or the job's first --set argument `fake=...`, says what it does. Each start writes a file
into the folder FAKE_WORKER_LOG, with the backend in it. It starts quickly, since it imports nothing of ours.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    job = json.loads(sys.stdin.read())
    layers = len(job["layers"])
    told = os.environ.get("FAKE_WORKER_TOLD") or job["sets"][0].removeprefix("fake=")
    log = Path(os.environ["FAKE_WORKER_LOG"])
    (log / f"{layers}-{os.getpid()}").write_text(job["backend"], encoding="utf-8")
    if told == "killed" or (told == "killed above 12" and layers > 12):
        os.kill(os.getpid(), signal.SIGKILL)
    if told == "killed once" and len(list(log.glob(f"{layers}-*"))) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if told == "too large":
        largest = {"name": "loss / logits", "shape": "f32[4,4]", "count": 1, "bytes": 2e10}
        refused = {"used": 3e11, "limit": 1.02e11, "largest": [largest]}
        held = {"weights": 1e9, "adapters": 1.0, "optimizer": 1.0, "batch": 1.0}
        give(layers=layers, **held, out_of_memory=refused)
        return
    if told == "late":
        time.sleep(0.3)
    if told == "slow":
        time.sleep(60)
    if told == "silent":
        print("no room for maneuver", file=sys.stderr)
        sys.exit(3)
    if told == "refused":
        said = "ERROR: Illegal value 'maybe' specified for flag 'xla_enable_async_all_gather'"
        print("noise", said, "trace", sep="\n", file=sys.stderr)
        sys.exit(1)
    if told == "failed":
        give(message="it is not to be", help="do else")
        return
    # 2 seconds outside of the layers, and 0.5 in each layer.
    figure = 2.0 + 0.5 * layers
    steps: list[dict[str, Any]] = [{"products": figure}]
    transfers = []
    if job["generates"]:
        # 1 ms for each layer in a pass of a loop, and as much for the prompts; fsdp gathers 400 MB of it.
        one = {"products": 0.001 * layers}
        body = [one]
        if "rollout.axes={fsdp: 8}" in job["sets"]:
            gather = {"kind": "all-gather", "name": "", "axes": ["fsdp"], "over_dcn": False, "along": ["0"]}
            transfers = [{**gather, "bytes": 4e8 * layers, "seconds": 0.002 * layers}]
            body.append({"transfer": 0})
        steps = [one, {"times": 1, "body": body, "counted": False}]
    give(
        layers=layers,
        weights=figure,
        adapters=figure,
        optimizer=figure,
        batch=1.0,
        arguments=3 * figure + 1.5,
        temporaries=10 * figure,
        code=1.0,
        flops=figure,
        bytes=figure,
        schedule={"steps": steps, "transfers": transfers},
        compile_seconds=1.0,
    )


def give(**result: Any) -> None:
    print(json.dumps(result))


if __name__ == "__main__":
    main()
