"""One host's side of a save, a backup and a restore."""
