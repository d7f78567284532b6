"""Writing checkpoints in the formats of other programs."""
