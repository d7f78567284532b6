"""Clients of object stores: set up once, and their failures known for what they are."""

import os
import subprocess
import sys
from unittest import mock

import fsspec
import pytest
from etils import epath

from elastic_ckpt.core import bucket_clients, clock, errors, jsonlog, storage
from elastic_ckpt.tiers.persistent import persistent_root, persistent_tier, retries
from tests import runs
from tests.tiers.tiered_steps import steps_of


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


HOST = """
import multiprocessing
from elastic_ckpt.elastic import station

station.warm_up([], "{}/run")
code = "import sys; sys.exit(7 * ('{}' in sys.modules))"
host = multiprocessing.get_context("forkserver").Process(target=exec, args=[code])
host.start()
host.join()
print(host.exitcode == 7, host.exitcode == 0)
"""


@pytest.mark.parametrize("bucket", ["gs://bucket", "s3://bucket", "/directory"])
def test_the_hosts_of_a_run_start_with_the_client_of_its_bucket(bucket):
    client = "s3fs" if bucket.startswith("s3") else "gcsfs"
    program = [sys.executable, "-c", HOST.format(bucket, client)]
    ended = subprocess.run(program, capture_output=True, text=True, check=True)
    is_there = "://" in bucket
    assert ended.stdout == f"{is_there} {not is_there}\n"


def test_a_client_of_before_lists_what_other_processes_write(bucket):
    protocol, directory = bucket.partition("://")[0], f"{bucket}/steps"
    # No other test has a client of these settings.
    before = fsspec.filesystem(protocol, use_listings_cache=True)
    other = fsspec.filesystem(protocol, skip_instance_cache=True)

    def listed_after(number):
        other.pipe(f"{directory}/{number}", b"")
        return [os.path.basename(path) for path in before.ls(directory)]

    assert listed_after(1) == ["1"]
    assert listed_after(2) == ["1"]
    bucket_clients._prepare_protocol.cache_clear()
    bucket_clients.prepare(bucket)
    assert listed_after(3) == ["1", "2", "3"]
    assert listed_after(4) == ["1", "2", "3", "4"]


def test_a_store_that_is_out_of_reach_is_one_clear_error_and_tried_again(monkeypatch):
    root = persistent_root.PersistentRoot.from_path("gs://bucket/run")
    tier = persistent_tier.PersistentTier(root, run="run")
    kind, waits = type(epath.Path("gs://bucket/run")), []
    monkeypatch.setattr(clock, "sleep", waits.append)
    for failure in failures():
        for name in ("exists", "iterdir", "read_bytes"):
            monkeypatch.setattr(kind, name, mock.Mock(side_effect=failure))
        with pytest.raises(errors.CheckpointError, match="cannot be read or listed"):
            steps_of(tier)
        (problem,) = tier.offers(3).problems
        assert "cannot be" in problem
        (line,) = runs.verb("inspect", "gs://bucket/run", code=1).splitlines()
        said = "elastic-ckpt inspect: gs://bucket/run cannot be read"
        assert line.startswith(said)
        write = mock.Mock(side_effect=[failure, failure, "written"])
        assert retries.call("writing /a", write) == "written"
    assert len(waits) == 2 * len(failures())
    # It is not tried again if it is refused.
    for failure in (PermissionError("Access Denied"), OSError("Forbidden: /bucket/a")):
        with pytest.raises(errors.CheckpointError, match="check the credentials"):
            retries.call("writing /a", mock.Mock(side_effect=[failure]))
