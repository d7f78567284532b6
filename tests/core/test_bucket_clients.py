"""Clients of object stores: set up once, and their failures known for what they are."""

import logging
import os

import aiohttp
import botocore.exceptions
import fsspec
import gcsfs.retry
import google.auth.exceptions
import pytest
from etils import epath

from elastic_ckpt.core import append_log, bucket_clients, errors, storage
from elastic_ckpt.tiers.persistent import persistent_root, persistent_tier, retries
from tests import runs

FAILURES = [
    botocore.exceptions.EndpointConnectionError(endpoint_url="http://store"),
    botocore.exceptions.NoCredentialsError(),
    gcsfs.retry.HttpError({"code": 503, "message": "later"}),
    aiohttp.ServerDisconnectedError(),
    google.auth.exceptions.DefaultCredentialsError("none"),
    PermissionError(13, "Permission denied"),
]
failing = pytest.mark.parametrize("failure", FAILURES, ids=lambda it: type(it).__name__)


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
    for touch in (storage.absolute, append_log.read, append_log.AppendLog):
        with pytest.raises(errors.ConfigError, match=rf"'\.\[{extra}\]'"):
            touch(f"{protocol}://bucket/run")


@pytest.mark.parametrize(
    ("chosen", "level"),
    [(logging.NOTSET, logging.CRITICAL), (logging.DEBUG, logging.DEBUG)],
)
def test_clients_log_no_tracebacks_unless_a_user_asks(chosen, level, monkeypatch):
    client = logging.getLogger("gcsfs")
    monkeypatch.setattr(client, "level", chosen)
    bucket_clients._prepare_protocol.cache_clear()
    bucket_clients.prepare("gs://bucket/run")
    assert client.level == level


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


def names(paths):
    """The last part of each path."""
    return [os.path.basename(path) for path in paths]


@failing
def test_steps_that_are_out_of_reach_are_an_error_of_storage(failure, away):
    root = persistent_root.PersistentRoot.from_path("gs://bucket/run")
    tier = persistent_tier.PersistentTier(root, run="run")
    away(failure)
    with pytest.raises(errors.CheckpointError, match="cannot be listed"):
        tier.steps()
    (problem,) = tier.offers(3).problems
    assert "cannot be" in problem


@failing
def test_a_run_that_is_out_of_reach_is_one_clear_error(failure, away):
    away(failure)
    for verb in ("inspect", "verify"):
        output = runs.verb(verb, "gs://bucket/run", code=1)
        assert output.startswith(f"elastic-ckpt {verb}: gs://bucket/run cannot be read")
        assert "cannot be read" in output
        assert len(output.splitlines()) == 1


@pytest.mark.parametrize("failure", FAILURES[:-1], ids=lambda it: type(it).__name__)
def test_a_write_is_tried_again_when_a_client_fails(failure):
    failures = [failure, failure]

    def write():
        if failures:
            raise failures.pop()
        return "written"

    policy = retries.Retries(sleep=lambda _: None)
    assert policy.call("writing /a", write) == "written"
    assert not failures


@pytest.mark.parametrize(
    "failure", [PermissionError("Access Denied"), OSError("Forbidden: /bucket/a")]
)
def test_a_write_that_a_bucket_refuses_is_not_tried_again(failure):
    calls = []

    def write():
        calls.append(1)
        raise failure

    with pytest.raises(errors.CheckpointError, match="check who may write there"):
        retries.PATIENT.call("writing /a", write)
    assert len(calls) == 1
