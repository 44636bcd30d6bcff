"""Programs that people write around scans, with treescan and by hand."""
