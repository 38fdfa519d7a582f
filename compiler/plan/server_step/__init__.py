"""Plan a recipe's server by compiling tpu-inference's own step, in an environment that has tpu-inference.

`server_search.py` makes the plan. `compile.py` runs `server_worker.py` in that environment, without this
project.
"""
