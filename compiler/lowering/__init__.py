"""From a loaded recipe to a program: the model, the machine, the length of the run."""
