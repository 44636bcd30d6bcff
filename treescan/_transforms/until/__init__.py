"""Loops that end when a condition becomes false."""
