"""Read costs, collectives, schedule and largest arrays from a compiled program's HLO text."""
