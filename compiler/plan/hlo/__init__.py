"""What a compiled program's HLO text says: its costs, collectives, kernels and largest arrays."""
