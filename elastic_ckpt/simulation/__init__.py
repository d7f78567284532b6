"""Simulates what failures cost a run, with the decisions of real runs."""
