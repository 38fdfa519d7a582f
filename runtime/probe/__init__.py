"""What an artifact's probe.py measures on its machine: the machine, numbers, step time, and a merge."""
