"""The address at which other hosts reach this one."""

from __future__ import annotations

import ipaddress
import os
import socket

from jax._src import distributed

LOOPBACK = "127.0.0.1"
# Every machine calls itself by these names.
_OWN_NAMES = ("localhost", "127.", "::1")
# An address reserved for documentation: packets to it take the default route.
_ELSEWHERE = "192.0.2.1"


def of_this_host() -> str:
    """`POD_IP` in a pod, else the local address of the route to JAX's coordinator.

    Without a coordinator, this is the loopback address.
    """
    coordinator = getattr(distributed.global_state, "coordinator_address", None)
    if os.environ.get("POD_IP") or not coordinator:
        return os.environ.get("POD_IP", LOOPBACK)
    name = coordinator.rpartition(":")[0].strip("[]")
    own = toward(name)
    # A machine may resolve its own name to an address that others cannot reach.
    if ipaddress.ip_address(own).is_loopback and not name.startswith(_OWN_NAMES):
        return of_the_head()
    return own


def of_the_head() -> str:
    """`POD_IP`, or the local address of the default route; loopback without a route."""
    try:
        return os.environ.get("POD_IP") or toward(_ELSEWHERE)
    except OSError:
        return LOOPBACK


def toward(other: str) -> str:
    """The local address of the route to `other`, found without sending anything."""
    family, kind, *_, address = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
