from trl import GRPOConfig, GRPOTrainer

trainer = GRPOTrainer(model="Qwen/Qwen3-8B", args=GRPOConfig(num_generations=8))
