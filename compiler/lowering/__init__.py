"""Lowering: turn a loaded recipe into a program, with its model, its hardware and the length of the run."""
