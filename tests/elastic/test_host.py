"""A host leaves as its supervisor orders, and reports each SIGTERM."""

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import types

import pytest

from elastic_ckpt.elastic import host


@pytest.fixture
def pipes():
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize(
    ("own", "others", "answer", "loses_memory"),
    [
        (host.LEAVE, [host.LEAVE], "resume", False),
        (host.LEAVE, [host.LOSE_MEMORY], "resume", True),
        # The order has not reached all hosts yet.
        (host.LEAVE, [b""], "resume", False),
        (host.STOP, [b""], "stop", False),
        # The run ends while its hosts leave for another world.
        (host.LEAVE, [host.STOP], "stop", False),
        # The supervisor is lost, and kills this process.
        (None, [b""], "resume", False),
    ],
)
def test_all_hosts_leave_in_one_way(pipes, own, others, answer, loses_memory):
    ours, theirs = pipes
    member = host.Member(address="", num_hosts=2, host=1)
    checked = []
    leaving = host._HostAnswers(
        host.HostChannel(theirs),
        member,
        lambda step: step == 3,
        lambda: checked.append(1),
    )
    leaving._hosts = types.SimpleNamespace(
        gather=lambda _, mine, **__: [mine, *(each.decode() for each in others)]
    )
    assert [leaving(1), leaving(2)] == [None, None]
    if own is None:
        ours.close()
        # What the steps have reported cannot be sent any more.
        leaving._channel.step = lambda: None
    else:
        ours.send_bytes(own)
    assert [leaving(3), leaving(4)] == [answer, answer]
    assert (leaving.step, leaving.loses_memory) == (3, loses_memory)
    assert len(checked) == 4


def test_the_newest_order_counts(pipes):
    ours, theirs = pipes
    channel = host.HostChannel(theirs)
    assert channel.order() == b""
    ours.send_bytes(host.LOSE_MEMORY)
    ours.send_bytes(host.STOP)
    assert [channel.order(600.0), channel.order(600.0)] == [host.STOP] * 2


EARLY = """
import os, signal, sys
# As in a process of a supervisor, before any thread is started.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
os.kill(os.getpid(), signal.SIGTERM)
from multiprocessing import connection
from elastic_ckpt.elastic import host, termination
channel = host.HostChannel(connection.Connection(int(sys.argv[1])))
host.configure(host.Hardware())
member = host.Member(address=sys.argv[2], num_hosts=1, host=0)
step = 0
with host.joined(member, channel), termination.agreed() as is_reached:
    while not is_reached(step):
        step += 1
"""


def test_sigterm_from_before_a_host_has_joined_is_reported(pipes):
    ours, theirs = pipes
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with subprocess.Popen(
        [sys.executable, "-c", EARLY, str(theirs.fileno()), address],
        pass_fds=[theirs.fileno()],
        env=os.environ,
    ) as child:
        theirs.close()
        messages = []
        while "sigterm" not in (messages or [{}])[-1]:
            messages.append(json.loads(ours.recv_bytes()))
    assert child.returncode == 0
    assert [each.get("phase") for each in messages[:-1]] == ["reach", "join"]
