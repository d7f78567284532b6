"""Worlds: starting and joining host processes, and handling their failures."""
