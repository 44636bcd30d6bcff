"""Loops over layers: several blocks that take turns."""
