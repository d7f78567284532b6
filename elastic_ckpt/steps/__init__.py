"""Manifests, which list the parts that hosts hold, and pure decisions based on them."""
