"""Reads the traces of steps."""
