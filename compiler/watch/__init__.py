"""`recipe watch`: `run.py` reads a run's progress and finds problems, `screen.py` prints and draws them."""
