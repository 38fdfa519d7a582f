"""The commands of `recipe`, a module each, how they speak, and how they end."""
