from datasets import load_dataset
from peft import VeraConfig
from trl import SFTTrainer

SFTTrainer("Qwen/Qwen3-8B", train_dataset=load_dataset("a/b", split="train"), peft_config=VeraConfig(r=8))
