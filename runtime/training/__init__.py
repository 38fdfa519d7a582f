"""The training: its loss, its step, its loop, and what surrounds them."""
