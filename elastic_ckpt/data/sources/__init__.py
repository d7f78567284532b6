"""Readers of training files, one file format each."""
