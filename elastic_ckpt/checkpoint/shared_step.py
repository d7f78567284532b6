"""Sharing a step: hosts report what they have, and host 0 deals them what they read.

See `host.step_sharing`. A host that cannot be reached by its neighbours in the tree
asks all others itself, as the only host of a world does.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from absl import logging

from elastic_ckpt.checkpoint import part_passes
from elastic_ckpt.checkpoint.host.answers import (
    CheckpointMetadata,
    HostsFailedError,
    SearchOutcome,
)
from elastic_ckpt.checkpoint.host.reader import HostReader
from elastic_ckpt.checkpoint.host.step_search import StepSearch
from elastic_ckpt.checkpoint.host.step_sharing import StepSharing
from elastic_ckpt.checkpoint.hosts import Hosts


def find(hosts: Hosts, step: int | None = None, **wanted: Any) -> SearchOutcome:
    """Has host 0 search what all hosts have.

    Args:
      hosts: of the world.
      step: None for the newest.
      **wanted: see `StepSearch.find`.

    Raises:
      HostsFailedError: if a certain step is not complete.
    """
    search = functools.partial(hosts.first, StepSearch.find, step, **wanted)
    offer = functools.partial(hosts.all, StepSharing.offer_saves)
    part_passes.gather(hosts, "restore", offer)
    if hosts.num_hosts == 1:
        return search()
    surveyed: tuple[int, ...] = ()
    while (outcome := search(surveyed=surveyed)).needs is not None:
        offer = functools.partial(hosts.all, StepSharing.offer_step, outcome.needs)
        part_passes.gather(hosts, "restore", offer)
        surveyed = (*surveyed, outcome.needs)
    if not outcome.is_shared:
        hosts.all(StepSharing.end)
    return outcome


def open_step(hosts: Hosts, checkpoint: CheckpointMetadata, *, is_shared: bool) -> None:
    """Opens a step on all hosts.

    Args:
      hosts: of the world.
      checkpoint: the step.
      is_shared: whether host 0 keeps its parts (`SearchOutcome`).

    Raises:
      HostsFailedError: if a host cannot open it.
    """
    step_id = checkpoint.step_id
    if is_shared:
        share = functools.partial(hosts.first, StepSharing.share, step_id)
        part_passes.deal(hosts, "restore", share)
    hosts.all(HostReader.open_step, step_id, is_shared=is_shared)


def deal(
    hosts: Hosts, checkpoint: CheckpointMetadata, components: Sequence[str]
) -> None:
    """Deals each host the parts that it reads; those that get none ask all others.

    Args:
      hosts: of the world; they have selected what they read.
      checkpoint: the step that is open, and shared.
      components: that all hosts read.
    """
    step_id = checkpoint.step_id
    try:
        part_passes.exchanged(
            hosts,
            "restore",
            offer=lambda: hosts.all(HostReader.offer_wanted),
            decide=lambda: hosts.first(StepSharing.plan, step_id, tuple(components)),
        )
    except HostsFailedError as error:
        logging.warning("step %d: each host plans its reads: %s", step_id.step, error)
