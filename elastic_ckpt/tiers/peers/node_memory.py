"""Which runs have room in the memory of a node, and which ended ones make room."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from elastic_ckpt.core import errors
from elastic_ckpt.tiers.peers.node_runs import Lifetime


@dataclasses.dataclass(frozen=True, kw_only=True)
class Use:
    """The memory of a run.

    Attributes:
      unused_secs: since a process used it; 0 while one has it.
      num_bytes: that its directory takes now.
      granted_bytes: that it may use, by the answer to its request.
    """

    unused_secs: float
    num_bytes: int
    granted_bytes: int = 0

    @property
    def claimed_bytes(self) -> int:
        """The bytes that others cannot have while the run lasts."""
        if self.unused_secs:
            return self.num_bytes
        return max(self.num_bytes, self.granted_bytes)


def to_make_room(
    path: str, num_bytes: int, others: Mapping[str, Use], lifetime: Lifetime
) -> list[str]:
    """The runs to remove so that another one fits, unused for the longest time first.

    A run that a process has is never among them, nor one whose pods may just be
    replaced (`Lifetime.least_unused_secs`).

    Args:
      path: of the run that needs room.
      num_bytes: that it uses at most.
      others: the other runs on the node, by path.
      lifetime: of runs, with the limit.

    Raises:
      RunError: if it does not fit even so; then none need be removed.
    """
    if lifetime.limit_bytes is None:
        return []
    free = lifetime.limit_bytes - sum(use.claimed_bytes for use in others.values())
    removed = []
    for each in sorted(others, key=lambda each: (-others[each].unused_secs, each)):
        if free >= num_bytes:
            break
        if others[each].unused_secs > lifetime.least_unused_secs:
            removed.append(each)
            free += others[each].claimed_bytes
    if free >= num_bytes:
        return removed
    remaining = [
        f"{each} {use.claimed_bytes} bytes"
        f" ({f'unused for {use.unused_secs:.0f} s' if use.unused_secs else 'in use'})"
        for each, use in sorted(others.items())
        if each not in removed
    ]
    raise errors.RunError(
        f"run {path} needs {num_bytes} bytes of this node's memory, but only"
        f" {max(0, free)} of {lifetime.limit_bytes} are available: other runs use"
        f" [{errors.first_of(remaining)}]; lower local_checkpoint_size_limit, raise"
        " node_agent_size_limit (--max-bytes), or use another node"
    )
