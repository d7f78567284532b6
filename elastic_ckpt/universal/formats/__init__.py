"""Reads the files of other programs without those programs, and without torch."""
