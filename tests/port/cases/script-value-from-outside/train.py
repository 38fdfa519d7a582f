from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

rate = float(input("learning rate: "))
SFTTrainer(
    model="Qwen/Qwen3-8B",
    train_dataset=load_dataset("some/chats", split="train"),
    args=SFTConfig(learning_rate=rate * 2, run_name=input("name: ")),
)
