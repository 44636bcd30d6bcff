"""`pipeline`: stages of a stack on different devices, at the same time."""
