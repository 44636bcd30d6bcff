"""`stream`."""
