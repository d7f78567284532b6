"""The share of the machine that hosts of the local launcher get."""

import contextlib

from elastic_ckpt.application import host_program, local_world
from elastic_ckpt.config import schema
from elastic_ckpt.core import events
from elastic_ckpt.data import token_blocks
from elastic_ckpt.elastic import member, multicontroller


def test_hosts_of_one_machine_share_its_cores_for_tokenising(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(token_blocks, "_num_cores", lambda: 12)
    monkeypatch.setattr(multicontroller, "configure", lambda *_: None)
    monkeypatch.setattr(multicontroller, "joined", lambda *_: contextlib.nullcontext())
    threads = []
    monkeypatch.setattr(
        host_program, "run", lambda *_: threads.append(token_blocks.num_threads(0))
    )
    for num_hosts in (1, 3):
        place = member.Member(address="127.0.0.1:1", num_hosts=num_hosts, host=0)
        local_world.run_host(schema.Config(), place, events.nobody)
    assert threads == [12, 4]
