"""Plan a recipe's server on paper. `server.py` makes the plan from the other modules' results."""
