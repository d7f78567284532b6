"""Metrics go through JAX's monitoring, by names in our namespace with their units."""

from unittest import mock

import pytest
from jax import monitoring

from elastic_ckpt.core import events, metrics


def test_every_metric_is_carried_by_jax_monitoring_under_its_name(monkeypatch):
    carried = []
    for kind in ("event_duration_secs", "scalar"):
        record = lambda *sent, kind=kind: carried.append((kind, *sent))  # noqa: E731
        monkeypatch.setattr(monitoring, f"record_{kind}", record)
    for metric in metrics.METRICS.values():
        metric.record(0.25)
        kind = "event_duration_secs" if metric.unit == "secs" else "scalar"
        assert carried.pop() == (kind, metric.name, 0.25)
        assert (metric.kind == "duration") == (metric.unit == "secs")
        assert metric.name.startswith("/elastic_ckpt/")
        assert metric.name.replace("/", "_").endswith(f"_{metric.unit}")
    assert not carried


def test_a_block_is_timed_unless_it_raised(recorded, monkeypatch):
    now = iter([10.0, 12.5, 20.0, 30.0])
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(now))
    with metrics.DATA_LOAD.timed():
        pass
    with pytest.raises(KeyError), metrics.DATA_LOAD.timed():
        raise KeyError
    assert recorded == {metrics.DATA_LOAD: [2.5]}


def test_somebody_s_broken_listener_does_not_end_the_run(caplog):
    broken = mock.Mock(side_effect=RuntimeError("its own bug"))
    monitoring.register_scalar_listener(broken)
    try:
        metrics.DATA_ROWS.record(8)
        metrics.DATA_ROWS.record(9)
    finally:
        monitoring.unregister_scalar_listener(broken)
    assert [call.args[1] for call in broken.call_args_list] == [8, 9]
    (message,) = [record.getMessage() for record in caplog.records]
    assert "failed on /elastic_ckpt/data/rows (RuntimeError: its own bug)" in message


def test_a_misspelt_event_or_field_is_caught():
    events.nobody("saved", step=1, secs=0.5)
    with pytest.raises(AssertionError, match="sved"):
        events.nobody("sved", step=1, secs=0.5)
    with pytest.raises(AssertionError, match="seconds"):
        events.nobody("saved", step=1, seconds=0.5)
