"""Checks of the recipe's server: its flags, its plan, its weights."""
