"""Transforms: each file holds one option, as a function from Loop to Loop with its checks and its Step."""
