"""Runs whose buckets refuse, break off, delay and lag come to their end."""

import pytest

from elastic_ckpt.core import storage
from tests import faulty_buckets, runs


@pytest.fixture
def faults(object_stores, bucket, monkeypatch):
    """The failures that processes see which start in the test."""
    del bucket
    faults = faulty_buckets.Faults()
    with faulty_buckets.before(object_stores, faults) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield faults


@pytest.fixture
def config(bucket, tmp_path, corpus):
    """A run with its data, its files and its steps in a bucket."""
    data = f"{bucket}/data/texts.array_record"
    with open(corpus, "rb") as file:
        storage.write_atomic(data, file.read())
    return runs.write_config(
        tmp_path,
        data,
        base_output_directory=bucket,
        grain_use_elastic_iterator=True,
    )


def train(config, *settings):
    ended = runs.cli("train", config, *settings)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def check(run):
    """All that was saved can be read, and each step had its batch."""
    # In separate processes: clients keep to the proxies, which end with the test.
    for verb in ("verify", "audit"):
        ended = runs.cli(verb, run)
        assert "PASSED" in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.slow(minutes=0.4)
def test_a_run_survives_refusals_and_broken_connections(config, faults, bucket):
    faults.share = 0.08
    train(config, "steps=8")
    assert "from step 8 to step 12" in train(config, "steps=12")
    faults.share = 0.0
    assert faults.happened.keys() == set(faulty_buckets.ALL)
    check(f"{bucket}/tiny")


@pytest.mark.slow(minutes=0.3)
def test_a_run_survives_lists_that_lag(config, faults, bucket):
    faults.lag_secs = 1.0
    train(config, "steps=8")
    train(config, "steps=12")
    faults.lag_secs = 0.0
    assert faults.happened["lag"] > 0
    check(f"{bucket}/tiny")


# The client of GCS tries for two minutes before it reports the same.
@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
@pytest.mark.slow(minutes=0.6)
def test_a_store_that_refuses_all_is_one_error_and_loses_nothing(
    config, faults, bucket
):
    train(config, "steps=8")
    faults.share, faults.kinds = 1.0, (faulty_buckets.UNAVAILABLE,)
    ended = runs.cli("train", config, "steps=12")
    assert ended.returncode == 1
    *_, message = ended.stderr.splitlines()
    assert message.startswith(f"elastic-ckpt train: {bucket}/data/")
    assert "in 4 tries ([Errno 16] Service Unavailable)" in message
    faults.share = 0.0
    assert "from step 8 to step 12" in train(config, "steps=12")
    check(f"{bucket}/tiny")
