"""`recipe new`: a commented recipe for a model and a machine, and what runs its checks.

`ask.py` asks on a terminal, `source.py` looks at the data, `machines.py` says where a model fits, `draft.py`
chooses the configuration by `memory.py`'s figures, `pace.py` how long it trains, `serving.py` the server's;
`recipe.py` makes the recipe of them and `text.py` writes it. `hooks.py` writes the workflow and the hooks,
`files.py` whatever is written.
"""
