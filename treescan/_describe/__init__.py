"""What `describe` finds out about a call of a verb, and how it is shown."""
