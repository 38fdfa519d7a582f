from datasets import load_dataset
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl.experimental.gkd import GKDConfig, GKDTrainer

teacher = AutoModelForCausalLM.from_pretrained(
    "Qwen/Qwen3-14B", dtype="float32", quantization_config=BitsAndBytesConfig(load_in_8bit=True)
)


def pair(row):
    return {"text": f"Q: {row['question']} A: {row['answer']}"}


trainer = GKDTrainer(
    "Qwen/Qwen3-8B",
    teacher,
    GKDConfig(output_dir="out", seq_kd=True, beta=2.0),
    train_dataset=load_dataset("our/questions", split="train").map(pair),
)
