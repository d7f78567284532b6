"""Clients of object stores: set up once, and their failures known for what they are."""

import os
import time

import fsspec
import pytest
from etils import epath

from elastic_ckpt.core import bucket_clients, clock, errors, jsonlog, storage
from elastic_ckpt.tiers.persistent import persistent_root, persistent_tier, retries
from tests import runs
from tests.tiers.tiered_steps import steps_of


@pytest.fixture(scope="module")
def failures():
    """Errors of clients, which take a while to import."""
    import aiohttp
    import botocore.exceptions
    import gcsfs.retry
    import google.auth.exceptions

    return [
        botocore.exceptions.EndpointConnectionError(endpoint_url="http://store"),
        botocore.exceptions.NoCredentialsError(),
        gcsfs.retry.HttpError({"code": 503, "message": "later"}),
        aiohttp.ServerDisconnectedError(),
        google.auth.exceptions.DefaultCredentialsError("none"),
    ]


@pytest.fixture
def away(monkeypatch):
    """Has every look at a path fail."""

    def away(failure):
        def fails(*_):
            raise failure

        for name in ("exists", "iterdir", "read_bytes"):
            monkeypatch.setattr(type(epath.Path("gs://bucket/run")), name, fails)

    return away


@pytest.mark.parametrize("protocol", ["gs", "s3"])
def test_an_object_store_without_its_client_is_an_error_that_names_the_extra(
    protocol, monkeypatch
):
    _, extra = bucket_clients._CLIENTS[protocol]
    monkeypatch.setitem(bucket_clients._CLIENTS, protocol, ("no_such_package", extra))
    bucket_clients._prepare_protocol.cache_clear()
    for touch in (storage.absolute, jsonlog.read, jsonlog.writer):
        with pytest.raises(errors.ConfigError, match=rf"'\.\[{extra}\]'"):
            touch(f"{protocol}://bucket/run")


def test_a_client_of_before_lists_what_other_processes_write(bucket):
    protocol = bucket.partition("://")[0]
    # No other test has a client of these settings.
    before = fsspec.filesystem(protocol, use_listings_cache=True)
    before.pipe(f"{bucket}/steps/1", b"")
    assert names(before.ls(f"{bucket}/steps")) == ["1"]
    other = fsspec.filesystem(protocol, skip_instance_cache=True)
    other.pipe(f"{bucket}/steps/2", b"")
    assert names(before.ls(f"{bucket}/steps")) == ["1"]
    bucket_clients._prepare_protocol.cache_clear()
    bucket_clients.prepare(bucket)
    assert names(before.ls(f"{bucket}/steps")) == ["1", "2"]
    other.pipe(f"{bucket}/steps/3", b"")
    assert names(before.ls(f"{bucket}/steps")) == ["1", "2", "3"]
    age_secs = time.time() - bucket_clients.last_written(f"{bucket}/steps")
    assert -60 < age_secs < 600


def names(paths):
    """The last part of each path."""
    return [os.path.basename(path) for path in paths]


def test_a_store_that_is_out_of_reach_is_one_clear_error(failures, away):
    root = persistent_root.PersistentRoot.from_path("gs://bucket/run")
    tier = persistent_tier.PersistentTier(root, run="run")
    for failure in [*failures, PermissionError(13, "Permission denied")]:
        away(failure)
        with pytest.raises(errors.CheckpointError, match="cannot be read or listed"):
            steps_of(tier)
        (problem,) = tier.offers(3).problems
        assert "cannot be" in problem
        for verb in ("inspect", "verify"):
            (line,) = runs.verb(verb, "gs://bucket/run", code=1).splitlines()
            said = f"elastic-ckpt {verb}: gs://bucket/run cannot be read"
            assert line.startswith(said)


def test_a_write_is_tried_again_when_a_client_fails_but_not_when_it_is_refused(
    failures, monkeypatch
):
    def failing(*problems):
        pending, calls = list(problems), []

        def write():
            calls.append(1)
            if pending:
                raise pending.pop()
            return "written"

        return write, calls

    monkeypatch.setattr(clock, "sleep", lambda _: None)
    for failure in failures:
        write, calls = failing(failure, failure)
        assert retries.call("writing /a", write) == "written"
        assert len(calls) == 3
    for failure in (PermissionError("Access Denied"), OSError("Forbidden: /bucket/a")):
        write, calls = failing(failure)
        with pytest.raises(errors.CheckpointError, match="check who may write there"):
            retries.call("writing /a", write)
        assert len(calls) == 1
