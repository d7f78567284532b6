"""Kubernetes manifests, generated from a configuration by pure functions."""
