"""What the CPU backend needs."""
