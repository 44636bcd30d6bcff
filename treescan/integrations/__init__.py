"""Libraries that treescan works with: imported by the user, or where a value of theirs is carried, never before."""
