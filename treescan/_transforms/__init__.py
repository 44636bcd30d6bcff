"""What a transform of a loop is, what it is given, and what several of them share."""
