from datasets import load_dataset
from trl import SFTConfig, SFTTrainer


def shorten(row):
    words = row["text"].split()
    row["text"] = " ".join(words[:200])
    return row


SFTTrainer(
    model="Qwen/Qwen3-8B",
    train_dataset=load_dataset("some/stories", split="train").map(shorten),
    args=SFTConfig(dataset_text_field="text", packing=True, gradient_accumulation_steps=4),
).train()
