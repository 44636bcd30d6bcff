"""Benchmarks of treescan against its peers: one file a suite, run by `python -m benchmarks`."""
