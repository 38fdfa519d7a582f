"""The language of recipes: models, YAML with positions, overrides, diagnostics, JSON Schema."""
