"""Reads other programs' files without those programs and without torch."""
