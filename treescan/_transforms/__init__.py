"""What a transform of a loop is, and the program of a call: its loop through all transforms."""
