"""`chunk_map`."""
