"""What makes a loop faster or smaller, and changes no number."""
