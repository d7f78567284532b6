"""What one host does, over all tiers, in a save, a backup and a restore."""
