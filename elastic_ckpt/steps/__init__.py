"""Manifests: the formats of what hosts hold, and the pure decisions over them."""
