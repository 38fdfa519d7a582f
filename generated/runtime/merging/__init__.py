"""From what was trained to folders that are served: merged weights, and PEFT adapters."""
