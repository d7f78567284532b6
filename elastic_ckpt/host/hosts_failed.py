"""The error that a driver raises when some hosts failed."""

from __future__ import annotations

from collections.abc import Mapping

from elastic_ckpt.core import errors


class HostsFailed(errors.CheckpointError):
    """A request failed on some hosts.

    Attributes:
      of_host: by the number of a host, its message.
    """

    def __init__(self, of_host: Mapping[int, str]) -> None:
        self.of_host = dict(of_host)
        problems = "; ".join(f"host {n}: {why}" for n, why in sorted(of_host.items()))
        super().__init__(problems)
