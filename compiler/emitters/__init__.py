"""One module per emitted file: each computes what its template prints."""
