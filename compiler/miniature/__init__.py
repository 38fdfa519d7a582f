"""Small versions of a model and of its recipe, which this machine can train."""
