"""Checkpoints of a run: one step holds all of its parts, or it does not exist."""
