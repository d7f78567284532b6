"""Simulates what failures cost a run: events over the decisions of the product."""
