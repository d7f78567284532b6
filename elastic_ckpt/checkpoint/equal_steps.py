"""Preserves the newest saved step from before copies of the state differed."""

from __future__ import annotations

from absl import logging

from elastic_ckpt.checkpoint.checkpointer import HostsCheckpointer
from elastic_ckpt.core import bucket_clients, errors, topology
from elastic_ckpt.tiers import preserved
from elastic_ckpt.tiers.persistent.persistent_root import PersistentRoot


def preserve_newest(checkpointer: HostsCheckpointer, *, up_to: int) -> int | None:
    """Preserves the newest step in persistent storage up to a step; all hosts call it.

    A backup that has begun is waited for: the step in it may be that one.

    Args:
      checkpointer: over the tiers.
      up_to: the step after which the copies of the state were equal.

    Returns:
      The step, to the primary host; None if there is none, or no storage.
    """
    checkpointer.wait()
    if not topology.is_primary():
        return None
    try:
        root = PersistentRoot.from_path(checkpointer.directory)
        step = max((each for each in root.steps() if each <= up_to), default=None)
        if step is not None:
            preserved.pin(root.final(step))
    except (errors.CheckpointError, *bucket_clients.failures()) as error:
        logging.error("no step up to %d could be preserved: %s", up_to, error)
        return None
    return step
