"""A plain JAX world, as a baseline for the recoveries of suite `recovery`.

Fresh processes are forked from a server that has imported JAX, join, and add up one
number per process in one jitted `psum`. Nothing is cached, restored or watched: this is
the minimum time for a world.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from multiprocessing import connection, forkserver

from elastic_ckpt.elastic import station


class ReservedPort:
    """A port of this machine, chosen by the OS and reserved until `close`."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        # As gRPC servers bind it.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._socket.bind((station.LOOPBACK, 0))
        self.address = f"{station.LOOPBACK}:{self._socket.getsockname()[1]}"
        self.close = self._socket.close


def worlds_secs(hosts: int, worlds: int) -> list[float]:
    """The time of each world, from its first process's fork to its last result.

    Each process has one device. One additional world runs first and is not counted.
    """
    forkserver.set_forkserver_preload(["jax", __name__])
    forkserver.ensure_running()
    # The fork server is still importing during the first world.
    return [_world_secs(hosts) for _ in range(worlds + 1)][1:]


def _world_secs(hosts: int) -> float:
    context = multiprocessing.get_context("forkserver")
    port = ReservedPort()
    began_secs = time.monotonic()
    receiver, sender = context.Pipe(duplex=False)
    processes = [
        context.Process(target=_add_up, args=(port.address, hosts, host, sender))
        for host in range(hosts)
    ]
    for process in processes:
        process.start()
    sender.close()
    # All processes use the machine's clock.
    done_secs = max(receiver.recv() for _ in processes)
    for process in processes:
        process.join()
    port.close()
    return done_secs - began_secs


def _add_up(
    address: str, hosts: int, host: int, done: connection.Connection[float, None]
) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(
        address,
        num_processes=hosts,
        process_id=host,
        coordinator_bind_address=address,
        cluster_detection_method="deactivate",
    )
    mesh = jax.make_mesh((hosts,), ("hosts",))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=jax.P("hosts"), out_specs=jax.P())
    def total(numbers: jax.Array) -> jax.Array:
        return jax.lax.psum(numbers, "hosts")

    sharding = jax.NamedSharding(mesh, jax.P("hosts"))
    numbers = jax.make_array_from_callback(
        (hosts,), sharding, lambda _: jax.numpy.ones(1)
    )
    assert float(total(numbers)[0]) == hosts
    done.send(time.monotonic())
    jax.distributed.shutdown()
