"""A host checks its devices, leaves as ordered, and reports phases."""

import itertools
import json
import multiprocessing
import types

import jax
import numpy as np
import pytest

import elastic_ckpt as ec
from elastic_ckpt.elastic import host
from elastic_ckpt.elastic.world import BetweenWorlds, World


@pytest.fixture
def pipes():
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        yield ours, theirs


# From one that has not reached a host, or its supervisor is lost, to the last one.
ORDERS = [b"", host.LEAVE, host.LOSE_MEMORY, host.STOP]


@pytest.mark.parametrize("other", ORDERS)
@pytest.mark.parametrize(
    "own", [ORDERS[at:to] for at, to in itertools.combinations(range(1, 5), 2)] + [[]]
)
def test_all_hosts_leave_in_one_way(pipes, own, other):
    ours, theirs = pipes
    if not own:
        ours.close()
    for order in own:
        ours.send_bytes(order)
    hosts = types.SimpleNamespace(gather=lambda _, mine, **__: [mine, other.decode()])
    agreed = max([host.LEAVE, other, *own], key=ORDERS.index)
    assert host.HostChannel(theirs).agree(hosts) == agreed


def test_a_phase_is_told_when_another_one_begins(pipes):
    ours, theirs = pipes
    channel = host.HostChannel(theirs)
    for phase in ("restore", "step", "step", "save"):
        channel.begin(phase)
    channel("world_left", step=3)
    assert [json.loads(ours.recv_bytes()) for _ in range(4)] == [
        {"phase": "restore", "begun": 1},
        {"phase": "step", "begun": 2},
        {"phase": "save", "begun": 4},
        {"event": "world_left", "fields": {"step": 3}},
    ]


def test_the_number_is_that_of_whole_numbers_on_every_device():
    size, modulus = host._SIZE, host._MODULUS
    rows, columns = np.indices((size, size)).astype(np.int64)
    weights = (5 * rows + 3 * columns * columns + 1) % modulus
    values = (7 * rows + 11 * columns) % modulus
    for _ in range(host._ROUNDS):
        values = values @ weights % modulus
    expected = int((values * (rows * size + columns + 1)).sum() % 2**32)
    assert expected == host.EXPECTED
    # Exact in bfloat16 and float32.
    assert modulus <= 2**8
    assert size * (modulus - 1) ** 2 < 2**24
    host.check_devices(jax.local_devices()[:2])


def test_no_step_is_done_or_saved_before_the_devices_are_sound(tmp_path):
    device = jax.local_devices()[0]
    wrong = f"{device} computed {host.EXPECTED + 1}, but sound devices"
    told = []
    between = BetweenWorlds(
        emit=lambda name, **_: told.append(name),
        await_check=lambda: host.check_devices([device], error=1),
    )
    world = World(number=1, slices=(0,), slice_name="0", _between=between)
    with world.checkpointer([ec.Persistent(tmp_path, every=1)]) as checkpointer:
        with pytest.raises(host.DeviceWrongError, match=wrong):
            checkpointer.save_checkpointables_async(1, {"state": {}})
        assert not checkpointer.checkpoints
    with pytest.raises(host.DeviceWrongError):
        between.leaving(1)
    assert not told
