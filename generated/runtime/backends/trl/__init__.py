"""A recipe's run by transformers, TRL, PEFT and accelerate: what baseline/train_trl.py stands on."""
