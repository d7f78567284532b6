"""Manifests, which list what hosts hold, and pure decisions based on them."""
