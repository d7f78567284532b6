"""Checkpoints of a run: a step is either complete or does not exist."""
