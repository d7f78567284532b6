"""Checkpoints of other programs: their layouts, and values for trees of ours."""
