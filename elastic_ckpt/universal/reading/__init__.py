"""Reads a checkpoint through a plan into the arrays of this host."""
