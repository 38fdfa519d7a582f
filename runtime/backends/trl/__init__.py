"""A recipe's run by transformers, TRL, PEFT and accelerate; baseline/train_trl.py uses this package."""
