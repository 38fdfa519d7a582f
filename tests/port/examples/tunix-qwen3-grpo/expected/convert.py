"""Rows of GSM8K as Tunix asks them: a prompt, and the number that the answer ends with."""

SYSTEM = (
    "You are given a problem. Think about the problem and provide your reasoning. "
    "Place it between <reasoning> and </reasoning>. Then, provide the final answer "
    "(i.e., just one numerical value) between <answer> and </answer>."
)


def convert(row):
    """A row of `question` and `answer`."""
    answer = row["answer"].split("####")[1].strip().replace(",", "") if "####" in row["answer"] else None
    return {
        "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}],
        "question": row["question"],
        "answer": answer,
    }
