"""The nodes of the hosts of a world: hosts on one machine are on one node.

Each host publishes the id of its machine when a component is made, and reads those of
the others when one is first saved or loaded: by then they are there, and no host waits.
"""

from __future__ import annotations

import pathlib
import socket
from collections.abc import Sequence

from jax._src import distributed

from elastic_ckpt.core import errors, topology

# How long to wait for a host that makes no such component.
_PATIENCE_SECS = 60
# Linux gives each boot of a machine an id, which its containers share.
_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")
_PREFIX = "elastic_ckpt/checkpoint/components/nodes"


class Nodes:
    """The nodes of all hosts.

    Args:
      processes_per_node: how many consecutive hosts are on a node; None finds out.

    Raises:
      ConfigError: if it is not a positive number.
    """

    def __init__(self, processes_per_node: int | None) -> None:
        if processes_per_node is not None and processes_per_node < 1:
            raise errors.ConfigError(
                f"processes_per_node={processes_per_node} is not a positive number;"
                " leave it out to compare the machines of the hosts"
            )
        self._processes_per_node = processes_per_node
        if processes_per_node is None:
            _publish()
        self._nodes: Sequence[str | int] | None = None

    def of_all_hosts(self) -> Sequence[str | int]:
        """The node of each host, by the host's number.

        Raises:
          RunError: if another host does not ask for its nodes.
        """
        if self._nodes is None:
            each = self._processes_per_node
            num_hosts = topology.num_hosts()
            if each is not None or num_hosts == 1:
                self._nodes = [number // (each or 1) for number in range(num_hosts)]
            else:
                self._nodes = _exchanged(num_hosts)
        return self._nodes


def this_node() -> str:
    """The id of this machine."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def _exchanged(num_hosts: int) -> list[str]:
    _publish()
    client = distributed.global_state.client
    return [_node(client, number) for number in range(num_hosts)]


def _publish() -> None:
    # Before JAX has joined a world this does nothing, and starts no backend.
    state = distributed.global_state
    if state.client is not None:
        state.client.key_value_set_bytes(
            f"{_PREFIX}/{state.process_id}", this_node().encode(), allow_overwrite=True
        )


def _node(client: object, number: int) -> str:
    key = f"{_PREFIX}/{number}"
    try:
        return client.blocking_key_value_get_bytes(  # pyrefly: ignore
            key, 1000 * _PATIENCE_SECS
        ).decode()
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise errors.RunError(
            f"the node of host {number} is unknown ({reason}); make the same components"
            " on every host, or give processes_per_node"
        ) from None
