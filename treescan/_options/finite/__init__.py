"""`check_finite`."""
