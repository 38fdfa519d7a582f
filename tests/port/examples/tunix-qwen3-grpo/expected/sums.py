import re


def right(prompts, completions, answer, **kwargs):
    found = [re.findall(r"\d+", each) for each in completions]
    return [
        float(bool(numbers) and numbers[-1] == wanted) for numbers, wanted in zip(found, answer, strict=True)
    ]


def texts(score):
    """Let a function of Tunix score the texts of completions."""
    from functools import wraps

    @wraps(score)
    def scored(*, completions, **columns):
        answers = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
        return score(completions=answers, **columns)

    return scored


right = texts(right)
