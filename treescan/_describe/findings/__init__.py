"""Things in a call that are worth changing: a table of codes, and a function for each code."""
