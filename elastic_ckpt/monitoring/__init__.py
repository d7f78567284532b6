"""Exporters for the metrics of `core.metrics`.

`prometheus.serving` serves metrics over HTTP. `summaries.listening` aggregates them to
a bounded number of points and passes the points to a sink: `summaries.json_lines` or
`tensorboard.event_file`. Each is a context manager that exports values recorded while
it is open. `goodput` derives a run's metrics from its events, such as how its time was
spent. METRICS.md lists all metrics and events.
"""
