"""Rows as the plain text of litgpt's alpaca style: a prompt, and the completion that is learned."""

WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n"
    "\n"
    "### Instruction:\n"
    "{instruction}\n"
    "\n"
    "### Input:\n"
    "{input}\n"
    "\n"
    "### Response:\n"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n"
    "\n"
    "### Instruction:\n"
    "{instruction}\n"
    "\n"
    "### Response:\n"
)


def convert(row):
    """A row of `instruction`, `input` and `output`."""
    given = row.get("input")
    template = WITH_INPUT if given else WITHOUT_INPUT
    text = template.format(instruction=row["instruction"], input=given)
    return {"prompt": text, "completion": row["output"]}
