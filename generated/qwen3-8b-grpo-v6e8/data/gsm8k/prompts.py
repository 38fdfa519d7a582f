"""Turn GSM8K's rows into prompts. Qwen3 does not think before it answers where it reads /no_think."""

ASKED = "\n\nThink step by step, and end with a line of #### and the number. /no_think"


def prompt(row):
    """Return the question as a conversation, with the column that the reward compares with."""
    return {"messages": [{"role": "user", "content": row["question"] + ASKED}], "answer": row["answer"]}
