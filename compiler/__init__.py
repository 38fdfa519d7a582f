"""The compiler: turns a recipe into a program, and a program into the files that run it."""

__version__ = "0.3.0"
"""The version of recipec. The package, `recipe --version` and the lock files all read it from here."""
