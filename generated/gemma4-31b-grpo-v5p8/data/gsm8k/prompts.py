"""Turn GSM8K's rows into prompts."""

ASKED = "\n\nThink step by step, and end with a line of #### and the number."
WITHOUT_THINKING = " /no_think"
"""Qwen3 answers at once where it reads this."""


def prompt(row):
    """Return the question as a conversation, with the column that the reward compares with."""
    return {"messages": [{"role": "user", "content": row["question"] + ASKED}], "answer": row["answer"]}


def prompt_of_qwen3(row):
    """Return the same for Qwen3, without its own thinking."""
    out = prompt(row)
    out["messages"][0]["content"] += WITHOUT_THINKING
    return out
