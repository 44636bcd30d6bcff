"""Loops that end when a condition no longer holds."""
