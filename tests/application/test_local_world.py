"""The share of the machine that hosts of the local launcher get."""

import contextlib
import multiprocessing

from elastic_ckpt.config import schema
from elastic_ckpt.data import token_blocks
from elastic_ckpt.elastic import (
    cluster,
    decision,
    host_process,
    member,
    multicontroller,
    world_host,
)


def test_hosts_of_one_machine_share_its_cores_for_tokenising(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(token_blocks, "_num_cores", lambda: 12)
    monkeypatch.setattr(multicontroller, "configure", lambda *_: None)
    monkeypatch.setattr(
        multicontroller, "joined", lambda *_, **__: contextlib.nullcontext()
    )
    monkeypatch.setattr(host_process.HostChannel, "wait", lambda _: None)
    threads = []
    _, pipe = multiprocessing.Pipe()
    for num_hosts in (1, 3):
        place = member.Member(address="127.0.0.1:1", num_hosts=num_hosts, host=0)
        work = decision.Train(slices=(0,), spares=(), rows=8, accumulated=1)
        world_host.run_host(
            lambda _: threads.append(token_blocks.num_threads(0)),
            schema.WorldSection(hosts=num_hosts),
            cluster.Assignment(number=1, work=work),
            world_host.Owned(memory=None, kept=None, grace_secs=60),
            place,
            host_process.HostChannel(pipe),
        )
    assert threads == [12, 4]
