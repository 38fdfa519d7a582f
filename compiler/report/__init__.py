"""A run, or a serving sweep, as one HTML page. `document.py` builds it from the other modules' results."""
