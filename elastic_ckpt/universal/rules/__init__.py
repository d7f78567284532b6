"""Rules that relate the tensors of one checkpoint layout with those of another.

GRAMMAR.md describes the language. `layout.Layout` holds rules, `matching.moves` matches
them with the tensors of a checkpoint and of a target.
"""
