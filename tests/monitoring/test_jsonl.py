from elastic_ckpt.core import jsonlog, metrics, storage
from elastic_ckpt.inspect import run_files
from elastic_ckpt.monitoring import summaries


def summary(value, count=1, **more):
    return {
        "time": 1795168800.25,
        "metric": metrics.DATA_ROWS.name,
        "count": count,
        "sum": value * count,
        **dict.fromkeys(("min", "max", "last"), value),
        **more,
    }


def write(path, *batches):
    with summaries.json_lines(path) as sink:
        for each in batches:
            sink([each])


LINE = (
    '{"time":1795168800.25,"metric":"/elastic_ckpt/data/rows","count":2,"sum":32.0,'
    '"min":16.0,"max":16.0,"last":16.0}\n'
)


def test_line_is_spelt_as_it_was(tmp_path):
    path = tmp_path / "host-00000.jsonl"
    write(path, summary(16.0, count=2))
    assert path.read_text() == LINE
    # A further start goes on after what a crash cut short.
    path.write_text(LINE + LINE[:30])
    write(path, summary(8.0))
    assert [line["sum"] for line in jsonlog.read(path)] == [32.0, 8.0]


def test_in_a_bucket_each_batch_is_uploaded_once(bucket, monkeypatch):
    moved = []
    write_atomic = storage.write_atomic

    def counted(path, content):
        moved.append(len(content))
        write_atomic(path, content)

    monkeypatch.setattr(storage, "write_atomic", counted)
    path = f"{bucket}/metrics/host-00000.jsonl"
    for _ in range(2):
        write(path, *map(summary, range(4)))
    lines = run_files.read_metrics(f"{bucket}/metrics")["host-00000"]
    assert [line["sum"] for line in lines] == [*range(4)] * 2
    assert len(moved) == 8
    assert max(moved) < 2 * len(LINE)


def test_what_a_replaced_start_records_is_not_read(tmp_path):
    path = tmp_path / "host-00000.jsonl"
    write(path, summary(1.0))
    for value, claim in ((2.0, 1), (3.0, 2), (4.0, 1), (5.0, 2)):
        write(path, summary(value, claim=claim))
    lines = run_files.read_metrics(tmp_path)[path.stem]
    assert [line["sum"] for line in lines] == [1.0, 2.0, 3.0, 5.0]
    assert all("claim" not in line for line in lines)


def test_full_disk_and_a_place_that_cannot_be_are_warnings(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    for path in ("/dev/full", tmp_path / "file" / "metrics.jsonl"):
        caplog.clear()
        with summaries.listening(summaries.json_lines(path), name=str(path)):
            metrics.DATA_ROWS.record(8)
        assert f"metrics cannot be written to {path}" in caplog.text
