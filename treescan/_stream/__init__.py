"""Loops over sources that need not fit into memory: what is read, the thread that reads, the loop, and checkpoints."""
