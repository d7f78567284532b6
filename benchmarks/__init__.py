"""Measurements: each suite runs all of its sides in one call and names the machine."""
