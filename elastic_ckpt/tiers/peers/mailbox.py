"""Messages that hosts leave in their RAM disks, where other hosts read them.

They are files in `hosts/<slot>/messages/`, which agents serve as they serve steps. A
host reads those of the same machine from the RAM disk.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence

from elastic_ckpt.core import storage
from elastic_ckpt.steps.manifest import Host
from elastic_ckpt.tiers.peers.peer_client import Endpoint
from elastic_ckpt.tiers.ram.ram_disk import MESSAGES, RamDisk
from elastic_ckpt.tiers.source import ReadError

MOST_BYTES = 2**31


class Mailbox:
    """The mail of one host.

    Args:
      disk: of its machine.
      slot: of the host.
      hosts: of the world, by number.
      endpoint: the agent of a machine of the world, by the id of the machine.
    """

    def __init__(
        self,
        disk: RamDisk,
        *,
        slot: int,
        hosts: Sequence[Host],
        endpoint: Callable[[str], Endpoint],
    ) -> None:
        self._disk = disk
        self._slot = slot
        self._hosts = hosts
        self._endpoint = endpoint

    def post(self, name: str, content: bytes) -> None:
        """Leaves a message, in place of one of that name."""
        directory = self._disk.host_directory(self._slot) / MESSAGES
        storage.write_atomic(directory / name, content)

    def read(self, host: int, name: str) -> bytes:
        """The message that a host has left.

        Raises:
          ReadError: if there is none, or the host cannot be reached.
        """
        there = self._hosts[host]
        if there.machine != self._disk.machine:
            path = f"/hosts/{there.slot}/{MESSAGES}/{name}"
            return self._endpoint(there.machine).read(path, most_bytes=MOST_BYTES)
        path = self._disk.host_directory(int(there.slot)) / MESSAGES / name
        try:
            return path.read_bytes()
        except FileNotFoundError:
            raise ReadError(f"cannot be read: {path} is missing") from None

    def remove(self, prefix: str) -> None:
        """Removes the messages of this host whose names begin so."""
        # The directory stays: another exchange may be about to post there.
        directory = self._disk.host_directory(self._slot) / MESSAGES
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(directory):
                if name.startswith(prefix):
                    storage.remove(directory / name)
