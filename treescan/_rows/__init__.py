"""Rows of unequal length: masks, padding, chunks that are skipped."""
