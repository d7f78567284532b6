"""Storage that refuses the account, or is no directory: one line, and what to do."""

import errno
import os

import pytest

from elastic_ckpt.core import errors, storage_cause
from elastic_ckpt.training import run_directory, schema
from tests import faulty_buckets, runs


@pytest.fixture
def faults(object_stores, bucket, monkeypatch):
    """The failures that processes see which start in the test."""
    faults = faulty_buckets.Faults()
    run_directory.write_config(f"{bucket}/tiny", schema.Config())
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
    [("gs", "roles/storage.objectAdmin on gs://"), ("s3", "s3:PutObject and")],
    indirect=["bucket"],
)
def test_a_bucket_that_refuses_the_account_is_one_line_with_the_role(
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
@pytest.mark.parametrize("bucket", ["gs", "s3"], indirect=True)
def test_a_bucket_that_cannot_be_reached_is_one_line(bucket, monkeypatch):
    for name in ("STORAGE_EMULATOR_HOST", "AWS_ENDPOINT_URL"):
        monkeypatch.setenv(name, "http://nowhere.invalid:1")
    line = failed("status", f"{bucket}/tiny", code=1)
    assert f"status: {bucket}/tiny: storage cannot be reached" in line


def test_an_output_directory_that_cannot_be_written_is_a_wrong_configuration(
    tmp_path, corpus
):
    config = runs.write_config(tmp_path, corpus)
    (tmp_path / "tiny").write_text("no directory")
    line = failed("train", config, code=78)
    assert "a file is where a directory has to be" in line
    # Nobody may make a directory there, not even root.
    line = failed("train", config, "base_output_directory=/sys", code=78)
    assert line.startswith("elastic-ckpt train: /sys/tiny: ")
    assert "check who may write there" in line


@pytest.mark.slow
def test_a_read_only_file_system_is_a_wrong_configuration():
    error = OSError(errno.EROFS, os.strerror(errno.EROFS), "/mnt/runs/tiny")
    told = storage_cause.explained(error, "runs")
    assert isinstance(told, errors.ConfigError)
    assert str(told) == (
        "/mnt/runs/tiny: Read-only file system; mount it so that it can be written to"
    )
