"""Scans of an associative operator, in rounds."""
