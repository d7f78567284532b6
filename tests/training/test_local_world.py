"""The share of the machine that hosts of the local launcher get."""

import contextlib
import multiprocessing

import pytest

from elastic_ckpt.data.lm import token_blocks
from elastic_ckpt.elastic import (
    cluster,
    decision,
    host_process,
    member,
    multicontroller,
    world_host,
)
from elastic_ckpt.training import schema


def members(num_hosts):
    return [
        member.Member(address="127.0.0.1:1", num_hosts=num_hosts, host=host)
        for host in range(num_hosts)
    ]


@pytest.mark.parametrize(("num_hosts", "threads"), [(1, 12), (3, 4)])
def test_hosts_of_one_machine_share_its_cores_for_tokenising(
    monkeypatch, num_hosts, threads
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(token_blocks, "_num_cores", lambda: 12)
    monkeypatch.setattr(multicontroller, "configure", lambda *_, **__: None)
    monkeypatch.setattr(
        multicontroller, "joined", lambda *_, **__: contextlib.nullcontext()
    )
    monkeypatch.setattr(host_process.HostChannel, "wait", lambda _: None)
    found = []
    _, pipe = multiprocessing.Pipe()
    work = decision.Train(slices=(0,), spares=(), rows=8, accumulated=1)
    world_host.run_host(
        lambda _: found.append(token_blocks.num_threads(0)),
        schema.WorldSection(hosts=num_hosts),
        cluster.Assignment(number=1, work=work),
        world_host.Owned(memory=None, kept=None, grace_secs=60),
        members(num_hosts)[0],
        host_process.HostChannel(pipe),
    )
    assert found == [threads]


@pytest.mark.parametrize(
    ("first_slice", "slices", "slots"),
    [(0, (0, 1, 2), [0, 1, 2, 3, 4, 5]), (0, (0, 2), [0, 1, 4, 5]), (4, (5,), [2, 3])],
)
def test_host_has_the_same_devices_in_all_worlds(first_slice, slices, slots):
    owned = world_host.Owned(
        memory=None, kept=None, grace_secs=60, first_slice=first_slice
    )
    assert [owned.slot(each, slices) for each in members(len(slots))] == slots
