"""`recipe parity`: train one recipe with several backends, and measure how far their runs differ."""
