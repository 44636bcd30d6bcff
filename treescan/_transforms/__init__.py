"""Transforms: each file holds one option as a function from Loop to Loop, and the Step that it wraps."""
