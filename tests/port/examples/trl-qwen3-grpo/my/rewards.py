def correct(completions, solution, **kwargs):
    return [float(s in c[0]["content"]) for c, s in zip(completions, solution, strict=True)]
