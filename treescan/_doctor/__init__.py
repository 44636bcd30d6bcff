"""`python -m treescan doctor`: what loops cost on this machine, and which faults its XLA has."""
