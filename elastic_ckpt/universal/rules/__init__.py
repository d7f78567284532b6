"""Rules that relate a checkpoint's tensors to a target's tensors.

GRAMMAR.md describes the language. A `layout.Layout` contains rules; `matching.moves`
matches them against the tensors on both sides.
"""
