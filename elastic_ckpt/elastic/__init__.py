"""Worlds: which processes compute together, and what happens when one of them fails."""
