"""`describe` and the plans of memory."""
