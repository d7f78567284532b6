"""Exporters for the metrics of `core.metrics`.

`prometheus.Prometheus` serves them over HTTP. `summaries.Summaries` aggregates them to
a bounded number of points and passes these to a sink: `jsonl.JsonLines` or
`tensorboard.TensorBoard`. An exporter is active from its construction until `close`.
"""
