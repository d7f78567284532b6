"""Exporters for the metrics of `core.metrics`.

`prometheus.serving` serves them over HTTP. `summaries.listening` aggregates them to a
bounded number of points and passes these to a sink: `summaries.json_lines` or
`tensorboard.event_file`. Each is a block, which hears what is recorded while it runs.
`goodput` derives the metrics of a run from its events, among them what its time
was spent on. METRICS.md lists all metrics and events.
"""
