"""Find, read and write weights in Hugging Face's format."""
