"""What a run of sums reads and rewards."""

import re

NUMBER = re.compile(r"-?\d[\d,]*")


def last_number(text):
    numbers = NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


def questions(cfg, *args, **kwargs):
    def transform(example, tokenizer=None):
        return {
            "prompt": [{"role": "user", "content": example["question"]}],
            "answer": example["answer"].split("####")[-1].strip(),
        }

    return transform, {"remove_columns": ["question"]}


def correct(prompts, completions, answer, **kwargs):
    return [
        float(last_number(each[0]["content"]) == wanted)
        for each, wanted in zip(completions, answer, strict=True)
    ]


def numbers(prompts, completions, **kwargs):
    return [1.0 if last_number(each[0]["content"]) else 0.0 for each in completions]
