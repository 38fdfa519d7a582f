"""Backends that train a recipe's model with other libraries: transformers' classes with PEFT's adapters.

Each backend's script reproduces train.py's run: the same micro-batches in the same order, the same initial
values of the adapters, the same loss, optimizer and schedule. The shared parts are here: the command line,
the model with its adapters, and the output. Each backend has its own folder.
"""
