"""`recipe watch`: `run.py` reads how a run goes and what looks wrong, `screen.py` says and draws it."""
