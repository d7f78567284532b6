import pytest
from jax import monitoring

from elastic_ckpt.core import metrics


@pytest.fixture
def carried():
    """The list, event and value of each call of a program's own listeners by JAX."""
    got = []

    def record_secs(event, duration_secs, **_):
        got.append(("durations", event, duration_secs))

    def record_scalar(event, value, **_):
        got.append(("scalars", event, value))

    monitoring.register_event_duration_secs_listener(record_secs)
    monitoring.register_scalar_listener(record_scalar)
    yield got
    monitoring.unregister_event_duration_listener(record_secs)
    monitoring.unregister_scalar_listener(record_scalar)


@pytest.mark.parametrize("metric", metrics.METRICS.values(), ids=metrics.METRICS)
def test_every_metric_is_carried_by_jax_monitoring_under_its_name(metric, carried):
    metric.record(0.25)
    heard_by = "durations" if metric.kind == "duration" else "scalars"
    assert carried == [(heard_by, metric.name, 0.25)]


@pytest.mark.parametrize("metric", metrics.METRICS.values(), ids=metrics.METRICS)
def test_a_name_is_in_our_namespace_and_ends_with_its_unit(metric):
    assert metric.name.startswith("/elastic_ckpt/")
    assert metric.name.replace("/", "_").endswith(f"_{metric.unit}")
    assert (metric.kind == "duration") == (metric.unit == "secs")


def test_a_block_is_timed(recorded, monkeypatch):
    now = iter([10.0, 12.5])
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(now))
    with metrics.DATA_LOAD.timed():
        pass
    assert recorded == {metrics.DATA_LOAD: [2.5]}


def test_a_block_that_raised_is_not_a_time(recorded):
    with pytest.raises(KeyError), metrics.DATA_LOAD.timed():
        raise KeyError
    assert recorded == {}


def test_an_amount_cannot_be_timed():
    with pytest.raises(AssertionError, match="rows"), metrics.DATA_ROWS.timed():
        pass


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
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert (
        "failed on /elastic_ckpt/data/rows (RuntimeError: its own bug)" in messages[0]
    )
