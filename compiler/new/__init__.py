"""`recipe new`: a commented recipe for a model and a machine, and the files that run its checks.

`ask.py` asks on a terminal, `data_source.py` examines the data, and `machines.py` says on which machines a
model fits. `draft.py` chooses the configuration by estimates of memory, and the length of training.
`new_recipe.py` chooses the server and puts the recipe together, and `new_recipe_text.py` writes its text.
`hooks.py` makes the workflow and the hooks, and `written_files.py` writes all files.
"""
