"""Stacks of layers."""
