"""What a loop keeps of its outputs."""
