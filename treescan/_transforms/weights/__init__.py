"""Products with weights that are computed for a chunk of steps at once."""
