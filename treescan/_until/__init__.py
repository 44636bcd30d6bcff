"""Loops that end early."""
