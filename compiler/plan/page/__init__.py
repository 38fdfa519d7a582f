"""A plan as one HTML page: `document.py` puts together what the other modules draw."""
