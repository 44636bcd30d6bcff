"""`progress`."""
