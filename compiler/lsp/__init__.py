"""`recipe lsp`: recipec's own diagnostics, repairs and explanations in editors.

Completion, and what the language says of a key, are yaml-language-server's, from the JSON Schema.
"""
