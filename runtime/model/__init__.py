"""The model: its families, its weights on a mesh, its adapters, and how it computes."""
