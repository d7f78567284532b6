"""All that one host of a joined world does for the tiers."""

from __future__ import annotations

from elastic_ckpt.host.backup import HostBackup
from elastic_ckpt.host.reader import HostReader
from elastic_ckpt.host.saver import HostSaver
from elastic_ckpt.host.world import HostWorld


class HostTiers:
    """One host's part in saves, copies, backups and restores.

    Args:
      world: the host among the others.
    """

    def __init__(self, world: HostWorld) -> None:
        self.world = world
        self.saver = HostSaver(world)
        self.backup = HostBackup(world)
        self.reader = HostReader(world)
