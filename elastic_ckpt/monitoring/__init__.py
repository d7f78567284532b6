"""Listeners that carry the metrics of `core.metrics` out of the program.

`prometheus.Prometheus` serves them over HTTP. `summaries.Summaries` hands them, summed
up in a bounded number of points, to a sink that keeps them: `jsonl.JsonLines` or
`tensorboard.TensorBoard`. A listener hears from its construction until `close`.
"""
