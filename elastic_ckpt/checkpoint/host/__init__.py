"""One host's part in a save, a backup and a restore."""
