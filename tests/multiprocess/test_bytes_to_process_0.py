"""The bytes that reach process 0: neither batches, nor data states, nor weights.

Process 0 has the coordination service and, under a single controller, the head's part.
Rows and states of colocated workers have to stay on their hosts. The counts are those
of the kernel, for all connections of process 0.
"""

import functools
import os
import pathlib
import secrets
import socket
import struct

import grain
import jax
import numpy as np
import pytest
from elastic_ckpt_sidecar import RemoteIterator
from jax.experimental import multihost_utils

import elastic_ckpt as ec
from elastic_ckpt.core import topology
from elastic_ckpt.data import sharded_data
from elastic_ckpt.elastic import multicontroller, supervisor
from elastic_ckpt.training import schema

HOSTS, NUM_SHARDS, ROWS, BATCHES = 3, 6, 6, 4
# Each far more than all the messages between hosts.
ROW_TOKENS = 1 << 17
STATE_BYTES = 1 << 18
WEIGHTS = 3 << 19
# A third of each is the part of process 0.
BATCH_BYTES = BATCHES * ROWS * ROW_TOKENS * 4
OF_OTHERS = {
    "batches": BATCH_BYTES * 2 // 3,
    "save": (NUM_SHARDS * STATE_BYTES + WEIGHTS * 4) * 2 // 3,
    "load": (NUM_SHARDS * STATE_BYTES + WEIGHTS * 4) * 2 // 3,
}
# The place of `tcpi_bytes_received` in Linux's `tcp_info`.
BYTES_RECEIVED = 128


class LongState(grain.IterDataset):
    """A step of a pipeline whose state is long."""

    def __iter__(self):
        return LongStateIterator(iter(self._parent))


class LongStateIterator(grain.DatasetIterator):
    def __next__(self):
        return next(self._parent)

    def get_state(self):
        # Another one each time: equal parts of states are saved once.
        long = secrets.token_hex(STATE_BYTES // 2)
        return {"parent": self._parent.get_state(), "long": long}

    def set_state(self, state):
        assert len(state["long"]) == STATE_BYTES
        self._parent.set_state(state["parent"])


def row(number):
    return {"tokens": np.full(ROW_TOKENS, number, np.int32)}


def make_shard(shard):
    numbers = grain.MapDataset.range(shard, 600, NUM_SHARDS).map(row)
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return LongState(numbers.to_iter_dataset(options))


def received_bytes():
    """The bytes that this process has received by the connections that it has."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            is_socket = os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
            duplicate = os.dup(int(name)) if is_socket else None
        except OSError:
            continue  # the descriptor of the listing itself
        if duplicate is None:
            continue
        with socket.socket(fileno=duplicate) as connection:
            if connection.family == socket.AF_UNIX:
                continue
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            total += struct.unpack_from("Q", info, BYTES_RECEIVED)[0]
    return total


def train(place, emit, *, directory):
    multicontroller.configure(schema.WorldSection())
    with multicontroller.joined(place):
        counted = 0

        def count(name):
            nonlocal counted
            multihost_utils.sync_global_devices(name)
            before, counted = counted, received_bytes()
            if place.host == 0:
                emit(
                    "step_interrupted", step=0, path=name, resume_step=counted - before
                )

        mesh = topology.mesh_of(topology.present(1))
        sharding = topology.over_all_devices(mesh)
        weights = jax.make_array_from_callback(
            (WEIGHTS,),
            sharding,
            lambda index: np.arange(WEIGHTS, dtype=np.float32)[index],
        )
        data = sharded_data.sharded(
            make_shard, num_shards=NUM_SHARDS, pipeline="long states"
        )
        batches = RemoteIterator(data, mesh=mesh, global_batch_size=ROWS)
        tiers = [ec.Persistent(directory, every=1)]
        with ec.Checkpointer(tiers, mesh=mesh) as checkpointer:
            count("start")
            for _ in range(BATCHES):
                jax.block_until_ready(next(batches))
            count("batches")
            parts = {"state": weights, "data": batches}
            checkpointer.save_checkpointables(BATCHES, parts)
            count("save")
            checkpointer.load_checkpointables(BATCHES, parts)
            count("load")
            # The counter counts: this reaches all processes.
            multihost_utils.process_allgather(weights, tiled=True)
            count("weights")
        batches.close()


@pytest.mark.slow
def test_batches_data_states_and_weights_stay_on_their_hosts(tmp_path):
    received = {}

    def record(_, **fields):
        received[fields["path"]] = fields["resume_step"]

    supervisor.HostProcesses(
        functools.partial(train, directory=str(tmp_path / "steps")),
        num_hosts=HOSTS,
        log_directory=tmp_path / "logs",
        emit=record,
    ).run()
    # The states were written in full.
    files = pathlib.Path(tmp_path / "steps" / str(BATCHES)).rglob("shards-*.json")
    assert sum(path.stat().st_size for path in files) > NUM_SHARDS * STATE_BYTES
    for name, num_bytes in OF_OTHERS.items():
        assert received[name] < num_bytes / 10, received
    assert received["weights"] > WEIGHTS * 4 * 2 // 3 * 0.99, received
