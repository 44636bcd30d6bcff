"""How a user's body is called, and what it may return."""
