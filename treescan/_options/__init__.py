"""Options: one file or folder each. Of the core, only verbs import them."""
