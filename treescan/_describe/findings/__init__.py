"""What one would want to change in a call: a table of codes, and a function for each of them."""
