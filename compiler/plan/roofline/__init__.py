"""A recipe's server planned on paper: `server.py` makes the plan of what the other modules work out."""
