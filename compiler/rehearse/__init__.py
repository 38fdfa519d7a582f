"""Run an artifact's scripts one after the other, in miniature, on this machine."""
