"""Transforms: each file holds one function from Loop to Loop, and the Step that it wraps around the loop's own.

Their order stands in `pipeline.assemble`, and nowhere else.
"""
