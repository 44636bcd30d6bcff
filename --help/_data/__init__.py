"""Stacks of layers, and batches of sequences."""
