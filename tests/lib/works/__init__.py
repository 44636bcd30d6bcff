"""The table of what works with what: verbs, their options and JAX's transforms, each held against its plain meaning."""
