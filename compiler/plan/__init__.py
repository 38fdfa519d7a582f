"""`recipe plan`: a recipe's training step compiled for its TPU on a machine without one.

`job.py` says what is compiled, `worker.py` compiles it in a process of its own, `pool.py` runs such
processes, `store.py` keeps what came out. `estimate.py` makes one estimate for the whole model of it,
`planner.py` a plan. Only the worker imports jax.
"""
