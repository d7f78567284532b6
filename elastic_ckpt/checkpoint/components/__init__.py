"""Components: state of a run other than weights and batches, and how hosts share it."""
