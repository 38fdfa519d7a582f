"""What commands tell: documents, their writers, and how numbers are written."""
