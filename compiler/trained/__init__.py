"""Uses of a trained model: chat with it, publish it, combine adapters."""
