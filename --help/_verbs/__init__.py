"""One file for each verb, and what they share."""
