"""What the gradient recomputes."""
