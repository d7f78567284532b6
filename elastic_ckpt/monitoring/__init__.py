"""Exporters for the metrics of `core.metrics`.

`prometheus.serving` serves them over HTTP. `summaries.listening` aggregates them to a
bounded number of points and passes these to a sink: `summaries.json_lines` or
`tensorboard.event_file`. Each is a context manager that exports what is recorded while
it is open. `goodput` derives the metrics of a run from its events, such as how its time
was spent. METRICS.md lists all metrics and events.
"""
