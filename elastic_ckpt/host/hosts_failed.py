"""What is raised where hosts are driven, when some of them could not do their part."""

from __future__ import annotations

from collections.abc import Mapping

from elastic_ckpt.core import errors


class HostsFailed(errors.CheckpointError):
    """What some hosts were asked for failed there.

    Attributes:
      of_host: by the number of a host, its message.
    """

    def __init__(self, of_host: Mapping[int, str]) -> None:
        self.of_host = dict(of_host)
        problems = "; ".join(f"host {n}: {why}" for n, why in sorted(of_host.items()))
        super().__init__(problems)
