"""Bad copies in RAM are put right from a good one.

Each host rewrites those in its own slot. Others lie on idle machines, in slots that the
present world does not use, or on backup hosts: their process is gone, or has no other
copy. They are dealt to the hosts of the world, each of which has the agent of the
machine write what was saved (`ram.ram_disk`). What is written was read from another
holder, verified.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from absl import logging

from elastic_ckpt.checkpoint.host.verified_read import BadCopy, VerifiedReader
from elastic_ckpt.core import errors
from elastic_ckpt.steps.manifest import Host
from elastic_ckpt.tiers import stored_part
from elastic_ckpt.tiers.find import FoundStep
from elastic_ckpt.tiers.ram.local import LocalHost
from elastic_ckpt.tiers.source import RepairableSource, RepairError

# The id of a holder, and the name of a part.
Place = tuple[str, str]


def dealt(bad: Sequence[BadCopy], hosts: Sequence[Host], number: int) -> set[Place]:
    """The bad copies that one host of a world repairs.

    Args:
      bad: that any host detected, the same on all hosts.
      hosts: of the world, by number.
      number: of the host.
    """
    places = {(each.host, each.name) for each in bad if each.tier == "local"}
    present = {host.id for host in hosts}
    idle = sorted(each for each in places if each[0] not in present)
    own = {each for each in places if each[0] == hosts[number].id}
    return own.union(idle[number :: len(hosts)])


def put_right(found: FoundStep, own: LocalHost, bad: Collection[Place]) -> list[str]:
    """Rewrites bad copies in a host's own slot, and elsewhere through agents.

    Args:
      found: the step.
      own: the host.
      bad: the copies.

    Returns:
      The names of the repaired items; why others were not is logged.
    """
    table, reader = found.table, VerifiedReader(found)
    mended = []
    wanted = {name for _, name in bad}
    for item in range(len(table)) if bad else ():
        name = table.name(item)
        for holder in table.holders_of(item) if name in wanted else ():
            host, source = table.holders[holder].host, found.sources[holder]
            if (host.id, name) not in bad or table.holders[holder].tier != "local":
                continue
            leaf, box = table.leaf(item), table.box(item)
            try:
                content = stored_part.content(leaf, reader.values(item))
                if host.id == own.host.id:
                    own.put_right(table.step_id, leaf, box, content)
                elif isinstance(source, RepairableSource):
                    source.put_right(leaf, box, content)
                mended.append(name)
            except (errors.CheckpointError, RepairError, OSError) as error:
                logging.warning("%s at host %s: %s", name, host.id, error)
    return mended
