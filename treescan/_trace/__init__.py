"""What is read off the trace of a step."""
