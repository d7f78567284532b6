"""Assembles runs from their configuration, apart from the command line."""
