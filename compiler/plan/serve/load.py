"""The points of a recipe's benchmark, from the times of the compiled steps.

A replica is taken to do nothing but decode and take in prompts, one after the other, without a pause: what
the host and the scheduler add is not counted.
"""

from __future__ import annotations

from compiler.plan.serve.estimate import Steps
from compiler.plan.serve.results import ServingPoint

ROUNDS = 60
"""Of the search for how many requests are under way at a rate."""


def point(
    steps: Steps,
    prompt: int,
    answer: int,
    rate: float | None,
    replicas: int,
    most: float,
    step_tokens: int,
) -> ServingPoint:
    """One point.

    Args:
        prompt, answer: tokens of each request.
        rate: of requests a second over all replicas, None for all at once.
        most: requests that a replica can have under way.
        step_tokens: max_num_batched_tokens.
    """
    context = prompt + answer / 2
    first = steps.prompt_seconds(prompt, step_tokens)
    most = max(1.0, most)

    def capacity(sequences: float) -> float:
        """Requests a second of a replica that has so many under way all the time."""
        return 1 / (first + answer * steps.decode_seconds(sequences, context) / sequences)

    def between_tokens(sequences: float, arriving: float) -> float:
        """Seconds between tokens, when prompts take their share of the time."""
        return steps.decode_seconds(sequences, context) / (1 - arriving * first)

    saturated = rate is None or rate / replicas >= capacity(most)
    if saturated:
        sequences, arriving = most, capacity(most)
    else:
        assert rate is not None
        arriving, sequences = rate / replicas, 1.0
        for _ in range(ROUNDS):
            latency = first + (answer - 1) * between_tokens(max(sequences, 1.0), arriving)
            sequences = min(most, arriving * latency)
    return ServingPoint(
        input_length=prompt,
        output_length=answer,
        request_rate=rate,
        concurrency=sequences * replicas,
        ttft=first,
        tpot=between_tokens(max(sequences, 1.0), arriving),
        tokens_per_second=arriving * answer * replicas,
        saturated=saturated,
    )
