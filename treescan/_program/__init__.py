"""The program of a call: its loop through all transforms, in the chunks that they ask for."""
