"""A fake `vllm bench serve`: it writes a result at once, or fails as planned.

Its folder holds plan.json: {"input-512-rate-4": "exit", ...}. Points without an entry succeed. Each call adds
a line to calls.jsonl, with its arguments and the keys of its environment.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(words: list[str]) -> int:
    assert words[:2] == ["bench", "serve"]
    flags = {words[i].removeprefix("--"): words[i + 1] for i in range(2, len(words) - 1)}
    length, answer = int(flags["random-input-len"]), int(flags["random-output-len"])
    prompts, rate = int(flags["num-prompts"]), flags["request-rate"]
    plan = json.loads((HERE / "plan.json").read_text()) if (HERE / "plan.json").is_file() else {}
    fault = plan.get(f"input-{length}-rate-{rate}", "")
    if fault == "hang-deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with (HERE / "calls.jsonl").open("a") as calls:
        keys = {name: os.environ.get(name) for name in ("OPENAI_API_KEY", "VLLM_API_KEY")}
        calls.write(json.dumps({"words": words, "pid": os.getpid(), **keys}) + "\n")
    print(f"Namespace(seed={flags['seed']})", flush=True)
    if fault == "exit":
        print("Traceback (most recent call last):\n  File ...\nOSError: /model holds no tokenizer")
        print("nanobind: leaked 4 types!\n - leaked type x")
        return 1
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.startswith("hang"):
        time.sleep(300)
    result = whole(length, answer, prompts, rate)
    if fault == "refused":
        result |= {"completed": prompts - 3, "failed": 3}
        print("Failed requests during benchmark run detected (capping to 10):")
        print("Error 0: Traceback (most recent call last):\n  ...\nServerDisconnectedError: gone")
        print("Error 1: Traceback (most recent call last):\nOther\ntip: install termplotlib")
    if fault == "short":
        result["total_output_tokens"] -= 7
    if fault == "nan":
        result["median_ttft_ms"] = float("nan")
    text = json.dumps(result)
    path = Path(flags["result-dir"]) / flags["result-filename"]
    path.write_text(text[: len(text) // 2] if fault == "half" else text)
    print("nanobind: leaked 64 types!")
    return 0


def whole(length: int, answer: int, prompts: int, rate: str) -> dict[str, object]:
    """Return a result whose times grow with the length and the rate."""
    load = 8.0 if rate == "inf" else float(rate)
    result: dict[str, object] = {
        "backend": "vllm",
        "num_prompts": prompts,
        "request_rate": rate if rate == "inf" else float(rate),
        "duration": prompts / load,
        "completed": prompts,
        "failed": 0,
        "total_input_tokens": prompts * length,
        "total_output_tokens": prompts * answer,
        "request_throughput": load,
        "output_throughput": load * answer,
    }
    for name, size in (("ttft", length / 10 + load), ("tpot", 10 + load), ("e2el", 900.0)):
        result |= {f"median_{name}_ms": size, f"p99_{name}_ms": 2 * size}
    return result


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
