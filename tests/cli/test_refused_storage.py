"""Storage that refuses the account, or is no directory: one line, and what to do."""

import pytest

from elastic_ckpt.training import schema
from tests import faulty_buckets, runs


@pytest.fixture
def faults(object_stores, bucket, monkeypatch):
    """The failures that processes see which start in the test."""
    faults = faulty_buckets.Faults()
    runs.write_record(f"{bucket}/tiny", schema.Config())
    with faulty_buckets.before(object_stores, faults) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield faults


def failed(*arguments, code):
    ended = runs.cli(*arguments)
    assert ended.returncode == code, ended.stdout + ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"elastic-ckpt {arguments[0]}: ")
    return line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bucket", "grant"),
    [("gs", "roles/storage.objectAdmin on gs://")],
    indirect=["bucket"],
)
def test_bucket_that_refuses_the_account_is_one_line_with_the_role(
    faults, bucket, grant, tmp_path, corpus
):
    config = runs.write_config(tmp_path, corpus, base_output_directory=bucket)
    faults.share, faults.kinds = 1.0, (faulty_buckets.FORBIDDEN,)
    for verb in ("status", "audit", "report"):
        assert grant in failed(verb, f"{bucket}/tiny", code=1)
    assert grant in failed("train", config, code=78)
    faults.share = 0.0
    faults.outage, faults.outage_kind = tmp_path / "outage", faulty_buckets.FORBIDDEN
    faults.outage.touch()
    line = failed("train", config, "run_name=other", code=78)
    assert f"train: {bucket}/other: " in line
    assert grant in line


@pytest.mark.slow
@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_bucket_that_cannot_be_reached_is_one_line(bucket, monkeypatch):
    for name in ("STORAGE_EMULATOR_HOST", "AWS_ENDPOINT_URL"):
        monkeypatch.setenv(name, "http://nowhere.invalid:1")
    line = failed("status", f"{bucket}/tiny", code=1)
    assert f"status: {bucket}/tiny: storage cannot be reached" in line
