"""Tiers of checkpoints: who holds what, who gets copies, what is read from whom."""
