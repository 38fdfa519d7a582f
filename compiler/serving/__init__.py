"""Serving: the server that an artifact starts, and `recipe serve`, which controls it."""
