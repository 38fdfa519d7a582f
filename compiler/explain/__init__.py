"""Show what a recipe means: explain, compare and price its values, and preview its data."""
