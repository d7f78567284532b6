"""Measurements: each suite runs all of its sides in one call and says the machine."""
