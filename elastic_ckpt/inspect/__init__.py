"""Reports that only people request: surveys of tiers and full verification."""
