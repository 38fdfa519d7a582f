"""A run, or a serving sweep, as one HTML page: `document.py` puts together what the other modules find."""
