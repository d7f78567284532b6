"""Kubernetes manifests, made from a configuration by pure functions."""
