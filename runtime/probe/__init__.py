"""What an artifact's probe.py finds out on its machine: the machine, its numbers, its time, a merge."""
