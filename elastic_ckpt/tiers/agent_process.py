"""Finds the agent of this machine, or starts one that ends with this process."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from elastic_ckpt.core import errors
from elastic_ckpt.tiers import agent


@contextlib.contextmanager
def running(service: agent.Service) -> Iterator[agent.Address]:
    """Yields where the agent of `service.root` listens.

    An agent that is there already is used, and outlives this process. Otherwise one is
    started, and ends at the end of the block, or when this process is killed.

    Raises:
      RunError: if there is none and none can be started.
    """
    with contextlib.ExitStack() as stack:
        found = agent.find_alive(service.root)
        if found is None:
            stack.enter_context(_started(service))
            found = agent.find(service.root)
            assert found is not None
        yield found


@contextlib.contextmanager
def _started(service: agent.Service) -> Iterator[None]:
    options = {
        "--interface": service.interface,
        "--port": service.port or None,
        "--secret-file": service.secret_file,
        "--tls-certificate": service.tls_certificate,
        "--tls-key": service.tls_key,
        "--max-bytes-per-sec": service.max_bytes_per_sec,
    }
    given = [
        str(word)
        for option, value in options.items()
        if value is not None
        for word in (option, value)
    ]
    command = [
        *(sys.executable, "-m", "elastic_ckpt.tiers.agent_command", service.root),
        *given,
        "--until-stdin-closes",
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdin
        if not process.stdout.readline():
            raise errors.RunError(
                f"the agent of {service.root} could not be started; its message is in"
                " this process's standard error"
            )
        try:
            yield
        finally:
            # Its end is the agent's.
            process.stdin.close()
            process.wait()
