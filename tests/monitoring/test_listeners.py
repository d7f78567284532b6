"""The contract of every listener of metrics."""

import re
import urllib.request

import pytest
from jax import monitoring

from elastic_ckpt.core import jsonlog, metrics
from elastic_ckpt.monitoring import prometheus, summaries, tensorboard
from tests.monitoring import event_file


class JsonLines:
    """JSON lines in a directory; `read` gives what has come of each metric, summed."""

    def __init__(self, directory):
        self._path = directory / "metrics" / "host-00000.jsonl"
        self.listener = summaries.Summaries(
            summaries.JsonLines(self._path), name="lines"
        )

    def read(self):
        self.listener.close()
        return summed((n["metric"], n["sum"]) for n in jsonlog.read(self._path))


class TensorBoard:
    def __init__(self, directory):
        self._directory = directory
        sink = tensorboard.TensorBoard(directory / "tensorboard")
        self.listener = summaries.Summaries(sink, name="board")

    def read(self):
        self.listener.close()
        return summed(
            (f"/{tag}", value) for tag, _, value in event_file.scalars(self._directory)
        )


class Prometheus:
    def __init__(self, directory):
        del directory
        self.listener = prometheus.Prometheus(port=0)
        self._text = None

    def read(self):
        if self._text is None:
            url = f"http://127.0.0.1:{self.listener.port}/metrics"
            with urllib.request.urlopen(url) as response:
                self._text = response.read().decode()
        actual = {}
        for name, metric in metrics.METRICS.items():
            sample = prometheus.spelling(metric)
            sample += {"duration": "_sum", "counter": "_total", "gauge": ""}[
                metric.kind
            ]
            values = re.findall(rf"^{sample} (.*)$", self._text, re.MULTILINE)
            # A gauge is served once it was recorded.
            assert len(values) == 1 or (metric.kind == "gauge" and not values)
            if values and float(values[0]):
                actual[name] = float(values[0])
        return actual


def summed(points):
    actual = {}
    for name, value in points:
        actual[name] = actual.get(name, 0.0) + value
    return actual


@pytest.fixture(params=[JsonLines, TensorBoard, Prometheus], ids=lambda c: c.__name__)
def started(request, tmp_path):
    reader = request.param(tmp_path)
    yield reader
    reader.listener.close()


def test_every_metric_reaches_it_with_its_value(started):
    # Sums of eighths are exact, in TensorBoard's 32 bits too.
    expected = {name: 0.125 * n for n, name in enumerate(metrics.METRICS, start=1)}
    monitoring.record_event_duration_secs("/jax/compile_secs", 2.0)
    monitoring.record_scalar("/jax/other", 2.0)
    for name, value in expected.items():
        metrics.METRICS[name].record(value)
    assert started.read() == expected


def test_once_closed_it_hears_nothing_more(started):
    metrics.DATA_ROWS.record(8)
    if isinstance(started, Prometheus):
        assert started.read() == {metrics.DATA_ROWS.name: 8.0}
    # Others may have cleared all listeners.
    monitoring.clear_event_listeners()
    started.listener.close()
    metrics.DATA_ROWS.record(16)
    assert started.read() == {metrics.DATA_ROWS.name: 8.0}
