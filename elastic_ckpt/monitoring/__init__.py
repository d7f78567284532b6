"""Exporters for the metrics of `core.metrics`.

`prometheus.Prometheus` serves them over HTTP. `summaries.Summaries` aggregates them to
a bounded number of points and passes these to a sink: `summaries.JsonLines` or
`tensorboard.TensorBoard`. An exporter is active from its construction until `close`.
`goodput` derives the metrics of a run from its events, among them what its time
was spent on. METRICS.md lists all metrics and events.
"""
