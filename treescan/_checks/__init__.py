"""Checks of arguments."""
