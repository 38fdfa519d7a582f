"""Prompts of open-instruct's rows, and what their verifier compares completions with."""

VERIFIER = "gsm8k"


def only(value):
    """The one value of a list, or the value itself."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def convert(row):
    """A row of `messages`, `ground_truth` and `dataset`."""
    if (named := str(only(row["dataset"])).lower()) != VERIFIER:
        raise ValueError(f"a row is for the verifier {named}, and the reward stands for {VERIFIER}")
    messages = row["messages"]
    prompt = messages if len(messages) == 1 else messages[:-1]
    return {"prompt": prompt, "ground_truth": only(row["ground_truth"])}
