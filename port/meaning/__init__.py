"""The meaning of the tools' common concepts in a recipe. Arguments and results are plain values."""
