"""Start, check, measure and verify the server of an artifact."""
