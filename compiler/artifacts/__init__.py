"""Artifacts on disk: written completely or not at all, checked, locked, packed."""
