"""Bounds of a step's time and memory from shapes alone, without compiling: of training and of a server."""
