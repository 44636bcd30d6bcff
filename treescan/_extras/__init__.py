"""What is built of the verbs. Nothing in the core knows it."""
