"""Rules that relate the tensors of a checkpoint to those of a target.

GRAMMAR.md describes the language. A `layout.Layout` has rules; `matching.moves` matches
them with the tensors of both sides.
"""
