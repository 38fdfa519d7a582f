"""`recipe watch`: how runs go, told while they go.

`places.py` reads folders here and elsewhere, `tail.py` the new lines of a file, `series.py` and `run.py` make
numbers of them, `findings.py` says what looks wrong. `words.py` says it, `plot.py` and `screen.py` draw
it, and `loop.py` goes round.
"""
