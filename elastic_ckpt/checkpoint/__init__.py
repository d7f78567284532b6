"""Checkpoints of a run: a step is complete, or it does not exist."""
