"""Masked scans: transforms of loops over rows of unequal length."""
