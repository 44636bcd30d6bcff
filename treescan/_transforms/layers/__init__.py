"""Loops over layers: states of their own, and weights that are gathered ahead."""
