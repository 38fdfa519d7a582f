"""Clients of a vLLM server. They need only the standard library and Python 3.10, which a TPU VM has."""
