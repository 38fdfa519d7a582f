import helpers


def correct(completions, **columns):
    return [helpers.score(text) for text in completions]


def positional(completions, /, **columns):
    return [0.0 for _ in completions]


def few(completions, answer):
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]
