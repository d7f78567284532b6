"""The tiers: where the bytes of steps are stored, and how they are read."""
