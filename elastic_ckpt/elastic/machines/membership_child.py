"""The disposable process that holds a client of JAX's coordination service.

JAX's client aborts its process when the service is lost, so supervisors do not hold it
themselves. One of these processes also holds the service. It has a place for every
machine of the run, and the service waits at first until all places are taken. The
places of machines that may be absent are therefore taken for a moment by clients of
this process; a machine that comes later takes its place over (`recoverable`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from multiprocessing import connection
from typing import Any

from elastic_ckpt.elastic import host_process

# Between two looks at the values of the others.
_LOOK_SECS = 0.2
# The prefix of the values that show that a machine is alive.
BEAT = "beat/"
# The directory of all values: the service does not list its root.
_ROOT = "values/"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a machine at a service.

    Attributes:
      machine: its number, from 0.
      num_machines: of the run.
      address: of the service, `host:port`.
      holds_service: whether this process opens the service.
      lost_secs: the time without a sign after which client and service give up.
    """

    machine: int
    num_machines: int
    address: str
    holds_service: bool
    lost_secs: int


def run(place: Place, log: str, pipe: connection.Connection) -> None:
    """Holds a client until the supervisor or the service is gone.

    It sends all values of the service whenever one changes, as a JSON object, and sets
    those that it receives. The end of the process is the message that the service, or
    the way to it, is lost.

    Args:
      place: of this machine.
      log: the file for the output.
      pipe: to the supervisor.
    """
    host_process.detach(log)
    from jax._src.lib import _jax

    service = None
    if place.holds_service:
        service = _jax.get_distributed_runtime_service(
            place.address,
            place.num_machines,
            heartbeat_timeout=place.lost_secs,
            recoverable=True,
        )
        for machine in range(place.num_machines):
            if machine != place.machine:
                threading.Thread(
                    target=_take, args=(place, machine), daemon=True
                ).start()
    client = _client(place, place.machine)
    client.connect()
    # The supervisor closes its end to end this process.
    with contextlib.suppress(EOFError, OSError):
        _exchange(client, place, pipe)
    del service


def _exchange(client: Any, place: Place, pipe: connection.Connection) -> None:
    shown: dict[str, str] | None = None
    beat = 0
    while True:
        while pipe.poll():
            for key, value in json.loads(pipe.recv_bytes()).items():
                client.key_value_set(_ROOT + key, value, allow_overwrite=True)
        beat += 1
        own = f"{_ROOT}{BEAT}{place.machine}"
        client.key_value_set(own, str(beat), allow_overwrite=True)
        values = {
            key.removeprefix(_ROOT): value
            for key, value in client.key_value_dir_get(_ROOT)
        }
        if values != shown:
            shown = values
            pipe.send_bytes(json.dumps(values).encode())
        time.sleep(_LOOK_SECS)


def _take(place: Place, machine: int) -> None:
    # Destroyed without saying so, its place is free again after `lost_secs`.
    with contextlib.suppress(Exception):
        _client(place, machine).connect()


def _client(place: Place, machine: int) -> Any:
    from jax._src.lib import _jax

    return _jax.get_distributed_runtime_client(
        place.address,
        machine,
        init_timeout=place.lost_secs,
        heartbeat_timeout=place.lost_secs,
        shutdown_on_destruction=False,
        use_compression=True,
    )
