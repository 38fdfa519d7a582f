"""The HTML pages of plans and reports: their parts, and how they write numbers."""
