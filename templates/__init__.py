"""Jinja2 templates: one per emitted file, in the same tree as the artifact."""
