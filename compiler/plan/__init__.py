"""`recipe plan`: compile a recipe's training step for its TPU on a machine without one.

`job.py` describes one compile. `worker.py` compiles it in its own process, and `pool.py` runs these
processes. `store.py` caches the results. `estimate.py` turns them into an estimate for the whole model, and
`planner.py` turns the estimate into a plan. Only the worker imports jax.
"""
