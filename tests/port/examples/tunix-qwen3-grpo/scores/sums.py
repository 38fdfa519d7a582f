import re


def right(prompts, completions, answer, **kwargs):
    found = [re.findall(r"\d+", each) for each in completions]
    return [
        float(bool(numbers) and numbers[-1] == wanted) for numbers, wanted in zip(found, answer, strict=True)
    ]
