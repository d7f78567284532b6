"""The part of one host in a save, a backup and a restore."""
