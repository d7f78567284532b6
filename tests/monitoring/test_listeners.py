"""Every listener of metrics: their contract, and the form in which each writes them."""

import contextlib
import re
import threading
import time
import types
import urllib.error
import urllib.request
from unittest import mock

import pytest
from jax import monitoring
from tensorboardX import event_file_writer

from elastic_ckpt.core import errors, jsonlog, metrics, storage
from elastic_ckpt.inspect import run_files
from elastic_ckpt.monitoring import prometheus, summaries, tensorboard
from tests.monitoring import event_file


@contextlib.contextmanager
def json_lines(directory):
    """JSON lines in a directory; yields what reads each metric and its value."""
    path = directory / "metrics" / "host-00000.jsonl"
    with summaries.listening(summaries.json_lines(path), name="lines"):
        yield lambda: [(line["metric"], line["sum"]) for line in jsonlog.read(path)]


@contextlib.contextmanager
def tensor_board(directory):
    sink = tensorboard.event_file(directory / "tensorboard")
    with summaries.listening(sink, name="board"):
        yield lambda: [(f"/{tag}", v) for tag, _, v in event_file.scalars(directory)]


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        return page.read().decode()


@contextlib.contextmanager
def served(directory):
    del directory
    samples = {}
    endings = {"duration": "_sum", "counter": "_total", "gauge": ""}
    with prometheus.serving(port=0) as port:
        yield lambda: [
            (name, float(samples[prometheus.spelling(metric) + endings[metric.kind]]))
            for name, metric in metrics.METRICS.items()
        ]
        samples |= re.findall(r"^(\w+) (.*)$", scrape(port), re.MULTILINE)


@pytest.mark.parametrize("listening", [json_lines, tensor_board, served])
def test_every_metric_reaches_it_with_its_value_until_it_ends(listening, tmp_path):
    # Eighths are exact, in TensorBoard's 32 bits too.
    expected = [(name, 0.125 * n) for n, name in enumerate(metrics.METRICS, start=1)]
    with listening(tmp_path) as read:
        monitoring.record_event_duration_secs("/jax/compile_secs", 2.0)
        monitoring.record_scalar("/jax/other", 2.0)
        for name, value in expected:
            metrics.METRICS[name].record(value)
    metrics.DATA_ROWS.record(16)
    assert sorted(read()) == sorted(expected)


def test_it_ends_though_others_have_cleared_all_listeners():
    kept = []
    with summaries.listening(contextlib.nullcontext(kept.extend), name="kept"):
        monitoring.clear_event_listeners()
    metrics.DATA_ROWS.record(16)
    assert kept == []


def test_later_values_are_summed_up_and_none_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(summaries, "NUM_SINGLE", 2)
    kept, before = [], time.time()
    board = tensorboard.event_file(tmp_path)
    with (
        summaries.listening(contextlib.nullcontext(kept.extend), name="kept"),
        summaries.listening(board, name="board"),
    ):
        metrics.TRAIN_CLAIM.record(7)
        for value in (1, 2, 4, 9, 5):
            metrics.DATA_ROWS.record(value)
        metrics.DATA_WAIT.record(0.5)
    assert all(before <= each["time"] <= time.time() for each in kept)
    assert [each["claim"] for each in kept] == [7] * 5
    fields = ("metric", "count", "sum", "min", "max", "last")
    rows, wait = metrics.DATA_ROWS.name, metrics.DATA_WAIT.name
    assert [tuple(map(each.get, fields)) for each in kept[1:]] == [
        (rows, 1, 1.0, 1.0, 1.0, 1.0),
        (rows, 1, 2.0, 2.0, 2.0, 2.0),
        (rows, 3, 18.0, 4.0, 9.0, 5.0),
        (wait, 1, 0.5, 0.5, 0.5, 0.5),
    ]
    # A point is the mean, at the number of its last value.
    assert event_file.scalars(tmp_path)[1:] == [
        *((rows[1:], 1, 1.0), (rows[1:], 2, 2.0), (rows[1:], 5, 6.0)),
        (wait[1:], 1, 0.5),
    ]
    assert event_file.marks(tmp_path) == [1]


def test_disk_that_hangs_holds_up_neither_recording_nor_the_end(monkeypatch, caplog):
    monkeypatch.setattr(summaries, "_CLOSE_SECS", 0.05)
    answer, asked, ended = threading.Event(), threading.Event(), threading.Event()
    kept = []

    def hanging(batch):
        asked.set()
        answer.wait()
        kept.extend(batch)
        if kept[1:]:
            ended.set()

    with summaries.listening(
        contextlib.nullcontext(hanging), name="hanging", interval_secs=0.01
    ):
        metrics.DATA_ROWS.record(1)
        assert asked.wait(600)
        metrics.DATA_ROWS.record(2)
    assert kept == []
    assert "no answer" in caplog.text
    answer.set()
    assert ended.wait(600)
    assert [s["last"] for s in kept] == [1.0, 2.0]


def test_full_disk_and_a_place_that_cannot_be_are_warnings(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    for path in ("/dev/full", tmp_path / "file" / "metrics.jsonl"):
        caplog.clear()
        with summaries.listening(summaries.json_lines(path), name=str(path)):
            metrics.DATA_ROWS.record(8)
        assert caplog.text.count(f"metrics cannot be written to {path}") == 1


def test_worlds_add_to_one_series_at_the_number_of_steps_done(tmp_path, monkeypatch):
    for second, steps in enumerate(((41, 42, 43), (43, 44))):
        # The names of the files order them by seconds.
        clock = types.SimpleNamespace(time=lambda second=second: 1e9 + second)
        monkeypatch.setattr(event_file_writer, "time", clock)
        with summaries.listening(tensorboard.event_file(tmp_path), name="board"):
            # What has no step does not drop the steps of an earlier start.
            metrics.SLICES.record(4)
            for step in steps:
                # A process that trains and writes the journal records each step twice.
                metrics.TRAIN_STEPS.record(step)
                metrics.TRAIN_STEPS.record(step)
                metrics.TRAIN_LOSS.record(step / 4)
    points = event_file.scalars(tmp_path)
    assert [point[1:] for point in points if "loss" in point[0]] == [
        *((41, 10.25), (42, 10.5), (43, 10.75)),
        *((43, 10.75), (44, 11.0)),
    ]
    assert len([point for point in points if "train/steps" in point[0]]) == 5
    assert event_file.marks(tmp_path) == [41, 43]


LINE = (
    '{"time":1795168800.25,"metric":"/elastic_ckpt/data/rows","count":2,"sum":32.0,'
    '"min":16.0,"max":16.0,"last":16.0}\n'
)


def write(path, *values, **more):
    """Writes the summary of two equal values, `values` times, each in its own batch."""
    with summaries.json_lines(path) as sink:
        for value in values:
            numbers = dict.fromkeys(("min", "max", "last"), value)
            summary = {"count": 2, "sum": 2 * value, **numbers, **more}
            sink([{"time": 1795168800.25, "metric": metrics.DATA_ROWS.name, **summary}])


def recorded_at(path):
    (lines,) = run_files.read_metrics(path).values()
    assert not any("claim" in line for line in lines)
    return [line["last"] for line in lines]


def test_line_is_spelt_as_it_was_and_those_of_a_replaced_start_are_not_read(tmp_path):
    path = tmp_path / "host-00000.jsonl"
    write(path, 16.0)
    assert path.read_text() == LINE
    # A further start goes on after what a crash cut short.
    path.write_text(LINE + LINE[:30])
    for value, claim in ((2.0, 1), (3.0, 2), (4.0, 1), (5.0, 2)):
        write(path, value, claim=claim)
    assert recorded_at(tmp_path) == [16.0, 2.0, 3.0, 5.0]


def test_in_a_bucket_each_batch_is_uploaded_once(bucket, monkeypatch):
    uploads = mock.Mock(wraps=storage.write_atomic)
    monkeypatch.setattr(storage, "write_atomic", uploads)
    for _ in range(2):
        write(f"{bucket}/metrics/host-00000.jsonl", *range(4))
    assert recorded_at(f"{bucket}/metrics") == [*range(4)] * 2
    sizes = [len(call.args[1]) for call in uploads.call_args_list]
    assert len(sizes) == 8
    assert max(sizes) < 2 * len(LINE)


def test_prometheus_gets_histograms_levels_and_sums_until_the_block_ends():
    with prometheus.serving(port=0) as port:
        assert "read_ahead_batches" not in scrape(port)
        for secs in (0.02, 0.02, 400.0):
            metrics.DATA_WAIT.record(secs)
        for value in (3, 1):
            metrics.DATA_READ_AHEAD.record(value)
            metrics.DATA_BYTES.record(value)
        lines = scrape(port).splitlines()
        for other in (port, 65536):
            message = rf"127\.0\.0\.1, port {other} .*prometheus_port"
            refused = pytest.raises(errors.ConfigError, match=message)
            with refused, prometheus.serving(port=other):
                pass
    name = "elastic_ckpt_data_wait_seconds"
    assert {
        f"# TYPE {name} histogram",
        f'{name}_bucket{{le="0.01"}} 0.0',
        f'{name}_bucket{{le="0.025"}} 2.0',
        f'{name}_bucket{{le="300.0"}} 2.0',
        f'{name}_bucket{{le="600.0"}} 3.0',
        f"{name}_count 3.0",
        "elastic_ckpt_data_read_ahead_batches 1.0",
        "elastic_ckpt_data_bytes_total 4.0",
    } <= set(lines)
    with pytest.raises(urllib.error.URLError):
        scrape(port)
    with prometheus.serving(port=port):
        pass
