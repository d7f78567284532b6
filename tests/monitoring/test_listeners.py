"""The contract of every listener of metrics."""

import contextlib
import re
import urllib.request

import pytest
from jax import monitoring

from elastic_ckpt.core import jsonlog, metrics
from elastic_ckpt.monitoring import prometheus, summaries, tensorboard
from tests.monitoring import event_file


def summed(points):
    actual = {}
    for name, value in points:
        actual[name] = actual.get(name, 0.0) + value
    return actual


@contextlib.contextmanager
def json_lines(directory):
    """JSON lines in a directory; yields what sums each metric at the end."""
    path = directory / "metrics" / "host-00000.jsonl"
    with summaries.listening(summaries.json_lines(path), name="lines"):
        yield lambda: summed((n["metric"], n["sum"]) for n in jsonlog.read(path))


@contextlib.contextmanager
def tensor_board(directory):
    sink = tensorboard.event_file(directory / "tensorboard")
    with summaries.listening(sink, name="board"):
        yield lambda: summed(
            (f"/{tag}", value) for tag, _, value in event_file.scalars(directory)
        )


@contextlib.contextmanager
def served(directory):
    del directory
    text = ""

    def read():
        actual = {}
        for name, metric in metrics.METRICS.items():
            sample = prometheus.spelling(metric)
            ending = {"duration": "_sum", "counter": "_total", "gauge": ""}
            sample += ending[metric.kind]
            values = re.findall(rf"^{sample} (.*)$", text, re.MULTILINE)
            # A gauge is served once it was recorded.
            assert len(values) == 1 or (metric.kind == "gauge" and not values)
            if values and float(values[0]):
                actual[name] = float(values[0])
        return actual

    with prometheus.serving(port=0) as port:
        yield read
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
            text = response.read().decode()


@pytest.mark.parametrize("listening", [json_lines, tensor_board, served])
def test_every_metric_reaches_it_with_its_value_until_it_ends(listening, tmp_path):
    # Sums of eighths are exact, in TensorBoard's 32 bits too.
    expected = {name: 0.125 * n for n, name in enumerate(metrics.METRICS, start=1)}
    with listening(tmp_path) as read:
        monitoring.record_event_duration_secs("/jax/compile_secs", 2.0)
        monitoring.record_scalar("/jax/other", 2.0)
        for name, value in expected.items():
            metrics.METRICS[name].record(value)
    metrics.DATA_ROWS.record(16)
    assert read() == expected


def test_it_ends_though_others_have_cleared_all_listeners():
    kept = []
    with summaries.listening(contextlib.nullcontext(kept.extend), name="kept"):
        monitoring.clear_event_listeners()
    metrics.DATA_ROWS.record(16)
    assert kept == []
