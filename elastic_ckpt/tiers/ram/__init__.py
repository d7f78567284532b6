"""The local tier: the steps that a machine's processes keep on its RAM disk."""
