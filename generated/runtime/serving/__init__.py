"""Clients of a vLLM server: the standard library alone, and Python 3.10, which a TPU VM has."""
