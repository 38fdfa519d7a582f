from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

rows = load_dataset("some/chats", split="train")
for rate in (1e-4, 2e-4):
    trainer = SFTTrainer("Qwen/Qwen3-8B", SFTConfig(learning_rate=rate), train_dataset=rows)
    trainer.train()
