"""The layout that a DeepSpeed checkpoint states of itself, as rules."""
