"""Words: a loop under two to five transformations of JAX, held to the same word over `jax.lax.scan` by hand.

A program is a body made of parts (`bodies`), a verb with options (`verbs`), and a word (`transformations`), whose first
letter is the outermost. Loops have 48 steps and eight features, because the library rewrites no loop of six and two.
"""
