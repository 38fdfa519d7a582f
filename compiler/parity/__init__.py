"""`recipe parity`: one recipe trained by several backends, and how far their runs lie apart."""
