"""Writes checkpoints in the formats of other frameworks."""
