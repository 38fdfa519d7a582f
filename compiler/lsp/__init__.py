"""`recipe lsp`: recipec's own diagnostics, repairs and explanations in editors.

yaml-language-server provides completion and the descriptions of keys, from the JSON Schema.
"""
