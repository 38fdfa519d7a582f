def score(text):
    return 1.0
