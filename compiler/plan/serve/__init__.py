"""A recipe's server planned by compiling tpu-inference's own step, in an environment that has it.

`plan.py` plans, `compile.py` runs `worker.py` there, which imports nothing of this project.
"""
