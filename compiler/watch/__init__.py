"""`recipe watch`."""
