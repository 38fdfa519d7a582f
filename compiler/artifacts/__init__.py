"""Artifacts on disk: written whole or not at all, checked, locked, packed."""
