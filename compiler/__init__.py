"""From a recipe to a program, and from a program to the files that run it."""

__version__ = "0.1.0"
"""The one place where it stands: the package, `recipe --version` and the locks have it from here."""
