"""Runs other projects' trainers, unmodified, on our data and checkpoints."""
