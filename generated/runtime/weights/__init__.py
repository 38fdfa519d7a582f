"""Weights in Hugging Face's format: found, read, written."""
