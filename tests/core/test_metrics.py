"""Metrics go through JAX's monitoring, by names in our namespace with their units."""

import pytest
from jax import monitoring

from elastic_ckpt.core import events, metrics


def test_every_metric_is_carried_by_jax_monitoring_under_its_name():
    carried = []

    def record_secs(event, duration_secs, **_):
        carried.append(("duration", event, duration_secs))

    def record_scalar(event, value, **_):
        carried.append(("scalar", event, value))

    monitoring.register_event_duration_secs_listener(record_secs)
    monitoring.register_scalar_listener(record_scalar)
    try:
        for metric in metrics.METRICS.values():
            metric.record(0.25)
            assert metric.name.startswith("/elastic_ckpt/")
            assert metric.name.replace("/", "_").endswith(f"_{metric.unit}")
            assert (metric.kind == "duration") == (metric.unit == "secs")
    finally:
        monitoring.unregister_event_duration_listener(record_secs)
        monitoring.unregister_scalar_listener(record_scalar)
    assert carried == [
        ("duration" if each.kind == "duration" else "scalar", each.name, 0.25)
        for each in metrics.METRICS.values()
    ]


def test_a_block_is_timed_unless_it_raised(recorded, monkeypatch):
    now = iter([10.0, 12.5, 20.0, 30.0])
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(now))
    with metrics.DATA_LOAD.timed():
        pass
    with pytest.raises(KeyError), metrics.DATA_LOAD.timed():
        raise KeyError
    assert recorded == {metrics.DATA_LOAD: [2.5]}


def test_somebody_s_broken_listener_does_not_end_the_run(caplog):
    calls = []

    def broken(event, value, **_):
        calls.append((event, value))
        raise RuntimeError("its own bug")

    monitoring.register_scalar_listener(broken)
    try:
        metrics.DATA_ROWS.record(8)
        metrics.DATA_ROWS.record(9)
    finally:
        monitoring.unregister_scalar_listener(broken)
    assert [value for _, value in calls] == [8, 9]
    (message,) = [record.getMessage() for record in caplog.records]
    assert "failed on /elastic_ckpt/data/rows (RuntimeError: its own bug)" in message


def test_a_misspelt_event_or_field_is_caught():
    events.nobody("saved", step=1, secs=0.5)
    with pytest.raises(AssertionError, match="sved"):
        events.nobody("sved", step=1, secs=0.5)
    with pytest.raises(AssertionError, match="seconds"):
        events.nobody("saved", step=1, seconds=0.5)
