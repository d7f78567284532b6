"""Simulates what failures cost a run, using the decision logic of real runs."""
