"""`lift`, and the groups of flax."""
