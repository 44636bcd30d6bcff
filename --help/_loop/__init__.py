"""What a loop is, how it is run, and how it is cut into chunks."""
