"""Other libraries that train a recipe's model: transformers' own classes, with PEFT's adapters.

Each backend's script gives the run that train.py gives: the same micro-batches in the same order, adapters
that begin with the same values, the same loss, optimizer and schedule. What they share is here: the command
line, the model and its adapters, what a run leaves behind. A backend has a folder of its own.
"""
