from datasets import load_dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-8B")


def short(completions, **kwargs):
    return [float(len(tokenizer(each).input_ids) < 100) for each in completions]


class Judge:
    def __call__(self, completions, **kwargs):
        return [1.0 for _ in completions]


trainer = GRPOTrainer(
    model="Qwen/Qwen3-8B",
    reward_funcs=[short, Judge(), "some/reward-model"],
    args=GRPOConfig(num_generations=8, per_device_train_batch_size=4, loss_type="sapo", delta=2.0),
    train_dataset=load_dataset("some/prompts", split="train"),
)
