"""The numbers of a run: where they go, and what a run tells of itself."""
