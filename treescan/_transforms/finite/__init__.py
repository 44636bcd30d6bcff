"""`check_finite`: the first step that made a NaN or an infinity, and the operation."""
