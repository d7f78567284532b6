"""The tiers: where the bytes of steps lie, and how they are read there."""
