"""The HTML pages that plans and reports are: their parts, and how they write numbers."""
