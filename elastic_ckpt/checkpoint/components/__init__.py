"""Components: a run's state other than weights and batches, and how hosts share it."""
