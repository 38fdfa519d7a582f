"""The points of a sweep, and the messages of a client's faults."""

from __future__ import annotations

ALL = ["input-512-rate-0.5", "input-512-rate-inf", "input-1024-rate-0.5", "input-1024-rate-inf"]
FIRST, SECOND, THIRD, LAST = ALL

FAULTS = {
    "exit": "vllm bench serve ended with exit status 1: OSError: /model holds no tokenizer",
    "killed": "vllm bench serve was ended by signal 9: Namespace(seed=5)",
    "nothing": "vllm bench serve ended without a complete result",
    "half": "vllm bench serve ended without a complete result",
    "nan": "vllm bench serve ended without a number for median_ttft_ms",
    "refused": "3 of 10 requests failed: ServerDisconnectedError: gone",
    "fewer": "1 of 10 requests failed",
    "short": "answers ended early: 153 of 160 tokens came",
}
