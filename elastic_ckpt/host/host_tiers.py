"""All that one host does for the tiers, phase by phase, as it is asked.

Whoever drives (`checkpoint.hosts`) asks all hosts for a phase, and goes on with their
answers. Arguments and answers are JSON wherever no arrays are meant, so a host may be
in this process, or beside an accelerator under another controller.
"""

from __future__ import annotations

import operator
from typing import Any

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

    def answer(self, phase: str, *arguments: Any) -> Any:
        """What a phase returns: `world.join`, `saver.write`, `reader.find`, ..."""
        return operator.attrgetter(phase)(self)(*arguments)

    def close(self) -> None:
        """Lets go of all that this process has; what was saved stays."""
        self.backup.close()
        self.world.close()
