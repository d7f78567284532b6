"""The program of a backup host: its agent, and the copies that it is asked for."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from multiprocessing import connection

from elastic_ckpt.checkpoint.host import backup_host
from elastic_ckpt.core import errors
from elastic_ckpt.elastic import termination
from elastic_ckpt.tiers.peers import (
    agent,
    agent_process,
    backup_directory,
    peer_client,
    secret,
)

_POLL_SECS = 0.1


def run(
    service: agent.Service, *, tls_ca: str | None, announce: Callable[[str], None]
) -> None:
    """Holds copies of a run until this process gets SIGTERM; in the main thread.

    Args:
      service: of its agent, with the file of the run's secret.
      tls_ca: a PEM file with the authority of other agents; None takes the system's.
      announce: called with a line for each event that people read.

    Raises:
      ConfigError: if there is no file of a secret.
      RunError: if the file holds no secret, or the agent cannot be started or ends.
    """
    if service.secret_file is None:
        raise errors.ConfigError(
            "--backup needs --secret-file: the hosts of the run have the same secret"
            " (peer_secret_file)"
        )
    root = service.root
    backup_directory.make(root)
    # The agent of a node, if there is one, reads it there.
    secret.adopt(root, secret.read(service.secret_file))
    with contextlib.ExitStack() as stack:
        notice = stack.enter_context(termination.Notice())
        own = agent_process.AgentProcess(dataclasses.replace(service, secret_file=None))
        stack.callback(own.close)
        client = peer_client.PeerClient(
            secret.read(service.secret_file),
            tls_ca=tls_ca,
            max_bytes_per_sec=service.max_bytes_per_sec,
        )
        stack.callback(client.close)
        host = backup_host.BackupHost(root, client)
        stack.callback(host.close)
        announce(f"serving {root} at {own.address.url}")
        while not connection.wait([notice], _POLL_SECS):  # type: ignore[list-item]
            own.check()
            try:
                fetched = host.poll()
            except errors.CheckpointError as error:
                # The hosts of the run ask again with a later step.
                announce(f"not fetched: {error}")
                continue
            if fetched is not None:
                announce(
                    f"fetched step {fetched.step}: {fetched.copies} parts,"
                    f" {fetched.num_bytes} bytes"
                )
