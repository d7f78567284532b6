"""Sharing a step: hosts report what they have, and host 0 deals them what they read.

See `host.step_sharing`. A host that cannot be reached by its neighbours in the tree
asks all others itself, as the only host of a world does.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from absl import logging

from elastic_ckpt.checkpoint import part_passes
from elastic_ckpt.checkpoint.host.answers import (
    CheckpointMetadata,
    HostsFailedError,
    SearchOutcome,
)
from elastic_ckpt.checkpoint.host.reader import HostReader
from elastic_ckpt.checkpoint.host.step_search import Query
from elastic_ckpt.checkpoint.host.step_sharing import StepSharing
from elastic_ckpt.checkpoint.hosts import Hosts


def find(hosts: Hosts, query: Query) -> tuple[SearchOutcome, int]:
    """Has host 0 search what all hosts have.

    Args:
      hosts: of the world.
      query: the step.

    Returns:
      The outcome, and the number of hosts that the step can be shared with; 0 if it
      cannot.

    Raises:
      HostsFailedError: if a certain step is not complete.
    """
    offer = functools.partial(hosts.all, StepSharing.offer_saves)
    num_hosts = part_passes.gathered(hosts, "restore", offer)
    if num_hosts == 1:
        return hosts.first(HostReader.find, query, None), 0
    surveyed: tuple[int, ...] = ()
    while True:
        outcome = hosts.first(HostReader.find, query, surveyed)
        if outcome.needs is None:
            break
        offer_step = functools.partial(hosts.all, StepSharing.offer_step, outcome.needs)
        part_passes.gathered(hosts, "restore", offer_step)
        surveyed = (*surveyed, outcome.needs)
    if outcome.is_shared:
        return outcome, num_hosts
    hosts.all(StepSharing.end)
    return outcome, 0


def open_step(hosts: Hosts, checkpoint: CheckpointMetadata, num_hosts: int) -> None:
    """Opens a step on all hosts.

    Args:
      hosts: of the world.
      checkpoint: the step.
      num_hosts: with which it can be shared; 0 if it cannot.

    Raises:
      HostsFailedError: if a host cannot open it.
    """
    step, save = checkpoint.step, checkpoint.save
    if num_hosts:
        decide = functools.partial(hosts.first, StepSharing.share, step, save)
        part_passes.dealt(hosts, "restore", decide, num_hosts=num_hosts)
    hosts.all(HostReader.open_step, step, save, is_shared=num_hosts > 0)


def deal(
    hosts: Hosts,
    checkpoint: CheckpointMetadata,
    num_hosts: int,
    components: Sequence[str],
) -> None:
    """Deals each host the parts that it reads; those that get none ask all others.

    Args:
      hosts: of the world; they have selected what they read.
      checkpoint: the step that is open.
      num_hosts: with which it is shared; 0 if it is not.
      components: that all hosts read.
    """
    if not num_hosts:
        return
    step, save = checkpoint.step, checkpoint.save
    try:
        part_passes.exchanged(
            hosts,
            "restore",
            offer=lambda: hosts.all(HostReader.offer_wanted),
            decide=lambda: hosts.first(StepSharing.plan, step, save, tuple(components)),
        )
    except HostsFailedError as error:
        logging.warning("step %d: each host plans its reads: %s", step, error)
