"""What the tools' common notions mean in a recipe; plain values in, plain results out."""
