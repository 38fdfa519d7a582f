"""The reward that stands for open-instruct's verifier gsm8k."""

import re

_FORM = re.compile(r".*?</think>\s*<answer>.*?</answer>", re.DOTALL)


def right(text, wanted):
    """Whether the last number of a text is written as the answer."""
    numbers = re.findall(r"[-+]?(?:\d*\.\d+|\d+)", re.sub(r"(\d),(\d)", r"\1\2", text))
    return (numbers[-1] if numbers else text).lower() == wanted.lower()


def verified(completions, ground_truth, **columns):
    """1 for a completion with the right answer, else 0."""
    texts = [said if isinstance(said, str) else said[-1]["content"] for said in completions]
    pairs = zip(texts, map(str, ground_truth), strict=True)
    return [float(_FORM.match(text) is not None and right(text, wanted)) for text, wanted in pairs]
