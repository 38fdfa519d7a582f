def correct(completions, answer, **columns):
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]
