"""Reads other frameworks' files without those frameworks and without torch."""
