"""What steps need because of the code that XLA generates on one CPU; callers ask, and need not know that backend."""
