"""`recipe plan`: compile a recipe's training step for its TPU on a machine without one.

`worker.py` compiles one `results.Job` in its own process, and `pool.py` runs these processes. `store.py`
caches the results. `planner.py` turns them into an estimate for the whole model, and that into a plan. Only
the worker imports jax.
"""
