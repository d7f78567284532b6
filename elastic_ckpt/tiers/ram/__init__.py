"""The local tier: what the processes of a machine keep on its RAM disk."""
