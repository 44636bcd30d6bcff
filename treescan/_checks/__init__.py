"""Checks of what the verbs are told."""
