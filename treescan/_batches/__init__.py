"""Batches of sequences."""
