"""Rows as Axolotl's `sums.questions` makes them."""


def questions(cfg, *args, **kwargs):
    def transform(example, tokenizer=None):
        return {
            "prompt": [{"role": "user", "content": example["question"]}],
            "answer": example["answer"].split("####")[-1].strip(),
        }

    return transform, {"remove_columns": ["question"]}


CHANGE = questions(None)[0]


def convert(row):
    """Return a row with the columns that the function makes."""
    return {**row, **CHANGE(row)}
